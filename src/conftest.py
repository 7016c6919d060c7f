"""Leave out modules that cannot be imported without libraries that are missing."""

from support.optional import missing_libraries

collect_ignore = [
    path
    for extra, path in (("demo", "veneer/demo"), ("pytensor", "veneer/interop/pytensor.py"))
    if missing_libraries(extra)
]

"""Leave out modules that cannot be imported without libraries that are missing."""

from support.optional import missing_libraries

collect_ignore_glob = [
    pattern
    for extra, pattern in (("demo", "veneer/demo"), ("pytensor", "veneer/interop/pytensor*.py"))
    if missing_libraries(extra)
]

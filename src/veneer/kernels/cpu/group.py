"""Products of the same activations by several matrices: jobs whose parts are taken as one job's.

The jobs lie one after the other, behind some words that are about all of them. Of each, the parts
that make what others read come before all else.
"""

from ...native.functions import c_function, call, native
from ...native.memory import set_word, word
from ...native.threads import new_job, run
from .job import FIRST, PARTS, WORDS

#: Words about all: how many jobs there are, the C function of a part, and how many parts are first.
_JOBS, _WORK, _FIRST = 0, 1, 2
#: How many those are.
_HEADER = 3


@native
def new_group(jobs):
    """Returns the address of so many new jobs, which `release` frees; or 0 without memory."""
    group = new_job(_HEADER + jobs * WORDS)
    if group != 0:
        set_word(group, _JOBS, jobs)
    return group


@native
def job_of(group, index):
    """Returns the address of a job."""
    return group + 8 * (_HEADER + index * WORDS)


@native
def _do_part(group, part):
    """Computes a part of some job."""
    job = job_of(group, 0)
    if part < word(group, _FIRST):
        while part >= word(job, FIRST):
            part -= word(job, FIRST)
            job += 8 * WORDS
    else:
        part -= word(group, _FIRST)
        while part >= word(job, PARTS) - word(job, FIRST):
            part -= word(job, PARTS) - word(job, FIRST)
            job += 8 * WORDS
        part += word(job, FIRST)
    return call(word(group, _WORK), (job, part))


@native
def run_group(frame, group, work, threads):
    """Has all parts of all jobs computed by a C function, on so many threads."""
    parts, first = 0, 0
    for i in range(word(group, _JOBS)):
        parts += word(job_of(group, i), PARTS)
        first += word(job_of(group, i), FIRST)
    set_word(group, _WORK, work)
    set_word(group, _FIRST, first)
    run(frame, group, c_function(_do_part, "veneer_do_part"), parts, first, threads)

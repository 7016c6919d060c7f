"""Policies for operands that are materialized.

The products in the tests are too small for a kernel, so their rules convert all codes to floats.
The tests therefore check only whether a rule fits.
"""

import veneer as vn


def only_by_rules(event):
    """Raise for a primitive without a rule. Allow operands that a rule materializes."""
    if event.rule is None:
        raise vn.MaterialiseError(str(event))


def without_rule(report):
    """Return the events of a report in which no rule fitted."""
    return [event for event in report.events if event.rule is None]

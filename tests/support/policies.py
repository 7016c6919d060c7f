"""What tests make of an operand that is made dense.

The products here are small. So no kernel serves them, and the way that their rule goes makes floats
of all codes; what is asked is whether a rule fits.
"""

import veneer as vn


def only_by_rules(event):
    """Refuses what no rule fits, and allows what the way of a rule makes dense: small products."""
    if event.rule is None:
        raise vn.MaterialiseError(str(event))


def without_rule(report):
    """The events of a report in which no rule fitted."""
    return [event for event in report.events if event.rule is None]

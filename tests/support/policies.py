"""Policies that tests choose: what they make of an operand that is made dense."""

import veneer as vn


def only_by_rules(event):
    """Refuses what no rule fits, and allows what the way of a rule makes dense: small products."""
    if event.rule is None:
        raise vn.MaterialiseError(str(event))

"""Report how implicit operands were computed: `vn.explain`, and the tables that show its report.

report      `explain`, and the `Report` that it returns
groups      group events by weight or by program line, and count equal events
page        a report as an HTML page with sortable tables
tables      tables as plain text, as HTML and for rich
"""

"""Report how implicit operands were computed: `vn.explain`, and the tables that show its report.

report      `explain`, and `Report`: its events as text and as a table of a notebook
groups      events grouped by weight or by line of the program, with equal events counted
page        the report as an HTML page with sortable tables
tables      tables as plain text, as HTML and for rich
"""

"""Report how implicit operands were computed: `vn.explain`, and the tables that show its report.

report      `explain`, and the `Report` that it returns, as text and as an HTML page
tables      tables as plain text, as HTML and for rich
"""

"""What ran where, for people: the report of `vn.explain`, and the tables that show it.

explain     runs a function once for its report
report      events, counted and added up, as text and HTML
tables      plain, HTML and coloured tables
"""

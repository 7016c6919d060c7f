"""What ran where, for people: the report of `vn.explain`, and the tables that show it.

explain     runs a function once for its report
report      events, counted and added up, as text and as a table of a notebook
groups      events in groups, by weight and by line of the program
page        the same as a page to sort and to fold, by weight and by line of the program
tables      plain, HTML and coloured tables
"""

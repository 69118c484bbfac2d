"""Charts as data (`kinds`, made by `build`), drawn for files by matplotlib (`draw`); the house style; sheets of tiles.

The report draws the same charts on its page, see `vitrail.report.charts`.
"""

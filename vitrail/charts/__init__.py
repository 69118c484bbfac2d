"""Charts as data: `kinds` defines them, `build` makes them, `draw` draws them with matplotlib.

`style` is the house style, `tiles` draws sheets of images. The report draws the same charts in HTML, see
`vitrail.report.charts`.
"""

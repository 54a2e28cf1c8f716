"""What the report's page is made of: figures become SVG text here, by pure functions.

story.py     the run as a page tells it: curves and happenings, gathered from events in one pass
scale.py     from values to positions: ticks, units, fewer points
charts.py    curves and rows of bars as SVG text
markup.py    sections, tables and legends as HTML text
sections.py  the page's sections: charts with the words around them
agreed.py    the section on runs in which workers do not step together
style.css    colours for light, dark and paper
hover.js     the tooltip
"""

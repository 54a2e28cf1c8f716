"""The parts of the report's page: pure functions that turn figures into HTML and SVG text.

history.py   a run's curves and incidents, collected from events in one pass
scale.py     from values to positions: ticks, units, fewer points
charts.py    line and bar charts as SVG text
markup.py    sections, tables and legends as HTML text
sections.py  the page's sections: charts and their explanations
stages.py    the stages of a pipeline
sync.py      the section on runs in which workers do not step together
planned.py   the section on the plan: predicted against measured
decided.py   the section on the run's own decisions: expected against measured
plan_picture.py the picture of a plan: groups, workers, links
style.css    colours for light, dark and print
hover.js     the tooltip
"""

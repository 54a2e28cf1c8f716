"""Measurements of strategies side by side, on one machine.

settings.py     the options of `echelon bench codecs`
codecs.py       trains a model once with each codec
codecs_page.py  shows the result as an HTML page
"""

"""Measurements that compare strategies on one machine.

settings.py     the options of `echelon bench codecs`
codecs.py       trains a model once with each codec
codecs_page.py  writes the result as an HTML page
"""

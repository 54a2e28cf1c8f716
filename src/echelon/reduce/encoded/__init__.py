"""How encoded gradients travel and add up: what is between a codec and a group.

message.py   the bytes of several pieces in one message
states.py  what codecs remember, by parameter: in checkpoints, for other numbers of workers
route.py   who exchanges encoded pieces with whom: everybody, or one worker of each site
rounds.py  the three ways in which encoded gradients of several workers become one
relay.py   the thread that encodes and decodes beside backward
bucket.py  a bucket whose gradients travel encoded
coding.py  all of it for one model
cost.py    does a codec pay on these links?
"""

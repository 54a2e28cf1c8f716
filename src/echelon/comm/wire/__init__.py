"""Messages on TCP connections, and the operations that send and receive them.

frames.py      the format of a message on the wire
connection.py  sends frames to one peer and receives frames from it
loop.py        the thread that serves all connections of a worker
operation.py   one operation of a group, as the loop and the waiting thread see it
exchange.py    carries out one worker's part of a collective's schedule
all_to_all.py  every member sends every other member a message of any length
mailbox.py     messages between two members at any time
summing.py     server processes that only sum
notices.py     what workers tell each other beside the payload: departures, failures, questions
roll_call.py   decides whom to blame when a deadline has passed (pure)
blame.py       the wording of such errors (pure)
"""

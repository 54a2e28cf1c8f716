"""Messages on TCP connections, and the operations that send and receive them.

frames.py      the format of a message on the wire
seals.py       finds bytes that were changed, repeated or left out: by a checksum, or with a key
sealed.py      messages on a stream of bytes, each with a seal
connection.py  sends frames to one peer and receives frames from it
loop.py        the thread that serves all connections of a worker and carries out its operations
exchange.py    carries out one worker's part of a collective's schedule
all_to_all.py  every member sends every other member a message of any length
mailbox.py     messages between two members at any time
summing.py     server processes that only sum
notices.py     control messages: departures, abandoned operations, what workers are doing
liveness.py    decides which workers are missing when a deadline has passed (pure)
watch.py       watches waits that last long: whom for, and can they end?
doing.py       what a worker is doing, in plain words, from the stack of its training thread
mismatch.py    decides whether workers make different calls, and says what to change (pure)
blame.py       the errors for workers that died, failed, left or are late (pure)
"""

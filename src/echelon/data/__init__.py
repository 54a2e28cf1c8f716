"""How does a table (a Spark DataFrame, a Ray Dataset, ...) become a loader? `loader_of` answers it.

A source writes the table once, as files of tensors: chunks. A catalogue lists them. Workers open chunks
when they need them, and need neither the engine nor pyarrow.

loader_of.py    what users call; the loader that it returns
source.py       the contract of sources: what a table can be
sources/        what can be read, one file each
columns.py      which columns become which tensors, and what is wrong with a value
arrow_columns.py  columns of Arrow as arrays
write.py        a stream of rows as chunks
chunk.py        what is known about chunks: the catalogue
collect.py      one catalogue of all that was written, or the first wrong row
dataset.py      rows of chunks as a torch data set
near.py         an order in which workers draw rows of their own machine
missing.py      can every worker read the chunks it needs? Copies those that it cannot
"""

"""What `loader_of` can read, one file each. `data/source.py` is their contract.

spark.py    a DataFrame of Spark, written by its tasks
ray.py      a Dataset of Ray, written by its tasks
pandas.py   a DataFrame of pandas
arrow.py    a Table of pyarrow
parquet.py  the path of Parquet files
arrays.py   a dict of arrays
"""

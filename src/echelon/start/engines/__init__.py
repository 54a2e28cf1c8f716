"""How engines start agents and end them: the parts that know an engine's own interface.

`launchers/` has the options that a user gives, and decides; here is what talks to the engine.

command_job.py    an engine's job that is a command, such as mpirun
ray_session.py    which Ray a launcher uses, and how it is left
ray_job.py        an engine's job that is a group of Ray's actors
sweeper.py        ends what is left of a Ray if its launcher is killed
dask_job.py       an engine's job that is a task on each of some of Dask's workers
spark_session.py  which Spark session a run uses, and how it is left
spark_job.py      an engine's job that is a barrier job of Spark
"""

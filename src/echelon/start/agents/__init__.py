"""Workers on other machines: an agent on each starts them, and sends back what they write.

protocol.py      the messages between a launcher and its agents
channel.py       carries messages over a pair of byte streams
agent.py         the process on the other machine: starts workers, follows their files
environment.py   which variables of an engine workers do not get
orphan.py        a process ends with the one that started it
callback.py      how an agent that an engine has started finds its launcher, and proves that it is invited
command_job.py   an engine's job that is a command, such as mpirun
ray_session.py   which Ray a launcher uses, and how it is left
ray_job.py       an engine's job that is a group of Ray's actors
sweeper.py       ends what is left of a Ray if its launcher is killed
dask_job.py      an engine's job that is a task on each of some of Dask's workers
spark_session.py which Spark session a run uses, and how it is left
spark_job.py     an engine's job that is a barrier job of Spark
gather.py        the agents of an engine's job, grouped by machine
driver.py        the launcher's side: starts agents, checks them, and watches their workers
reach.py         the agent's side of connections: which addresses of others does this machine reach?
pairs.py         the launcher's side: which pairs of machines can connect, and where do workers meet?
"""

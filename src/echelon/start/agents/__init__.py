"""Workers on other machines: an agent on each starts them, and sends back what they write.

protocol.py       the messages between a launcher and its agents
channel.py        carries messages over a pair of byte streams
agent.py          the process on the other machine: starts workers, follows their files
callback.py       how an agent that an engine has started finds its launcher, and proves that it is invited
command_job.py    an engine's job that is a command, such as mpirun
spark_job.py      an engine's job that is a barrier job of Spark
spark_session.py  which Spark session a run uses
gather.py         the agents of an engine's job, grouped by machine
driver.py         the launcher's side: starts agents, checks them, and watches their workers
"""

"""What starts agents on other machines, one file each. `start/launcher.py` is their contract.

local.py  this machine: no agent is needed
ssh.py    OpenSSH's own client, with the user's configuration
mpi.py    mpirun, of OpenMPI or MPICH
spark.py  a barrier job of Spark
"""

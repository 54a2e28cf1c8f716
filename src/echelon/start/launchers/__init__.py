"""What starts agents on other machines, one file each. `start/launcher.py` is their contract.

local.py  this machine: no agent is needed
ssh.py    OpenSSH's own client, with the user's configuration
mpi.py    mpirun, of OpenMPI or MPICH
slurm.py  srun, in a new allocation or an existing one
ray.py    actors of Ray
dask.py   tasks on the workers of a Dask cluster
spark.py  a barrier job of Spark
"""

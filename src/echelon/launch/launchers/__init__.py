"""What starts agents on other machines, one file each. `launch/launcher.py` is their contract.

ssh.py  OpenSSH's own client, with the user's configuration
"""

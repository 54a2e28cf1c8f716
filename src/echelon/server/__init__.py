"""The parameter server: its processes, its clients in the workers, and the messages between them.

On both sides:
    protocol.py        the messages, one class each
    layout.py          which server keeps which elements, and in which pieces they are sent
    encoding.py        gradients and weights written by a codec, in fewer bytes
    optimizer_spec.py  describes an optimizer, so that a server can build it
    mail.py            MemoryMailbox: messages through shared memory on one machine, over TCP otherwise
    ring.py            short messages from one process to another, in memory that both map
    shared_table.py    memory for a worker's push and its weights, which a server of its machine maps

In a worker:
    client.py          ServerClient: steps of one optimizer through the servers; connects the files below
    worker_rule.py     WorkerRule: what a worker does at a step and at each answer; pure
    pushes.py          PushSender: sends gradients piece by piece while backward goes on
    pulls.py           WeightsReceiver: receives weights and installs them in the parameters
    opening.py         opens a table: tells the servers what they keep, and sends the first weights
    channel.py         ServerChannel: sends messages, waits for answers, names silent peers

In a server:
    process.py         the server's process: meets the workers, serves, ends
    server.py          ParameterServer: checks messages, applies pushes, and carries out orders
    kept_table.py      KeptTable: the shards and replicas that a server keeps of one optimizer
    coordinator.py     Coordinator: on the first server, turns the policy's decisions into orders
"""

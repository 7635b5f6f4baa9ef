"""A fleet inside a Slurm allocation: the script that asks for one, its processes as steps, and what outlives a node.

script     what `flowfleet slurm up` submits
commands   `flowfleet slurm up | down | status | logs`
tools      calls of Slurm's programs
allocation the nodes of the job that this process runs in
probe      what each node says of itself before anything starts
steps      a process of the fleet as a step of `srun`
step       the wrapper inside a step, on its node
plan       the plan of a local stack, moved onto the nodes
head       supervises the fleet on the first node, from its start to its requeue
copies     Redis's data: on the node's disk, with a copy in the shared folder
"""

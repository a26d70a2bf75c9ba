"""`zerofold launch`: a script on many ranks of many hosts, torch's elastic agent underneath.

command.py   the options, turned into one plan per host
  hosts.py         hostfile, --include, --exclude: which slots of which hosts
  environment.py   which variables the other hosts are given
  remote.py        how a command is started on a host: ssh, srun, or a template of the user's
job.py       on the user's terminal: starts one agent per host, shows their output, ends them together
  plan.py          what an agent is told, and the lines in which the two speak
  processes.py     an agent's process: a command that reaches its host, or a copy of this one
  network.py       which address and which interface the hosts use among themselves
  output.py        prefixes, files, progress bars
  failures.py      which rank failed first, and the block that says so
agent.py     on each host: torch's elastic agent, told what to do through its standard input
  relay.py         what the ranks write, as whole lines
entry.py     in each rank: cores, then the script as Python would run it, and the record of its error
"""

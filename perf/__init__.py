"""Tables people can trust: what a copy reaches, what it was compared with, and what was counted.

`python -m perf --help` lists the commands. Only the command line imports this folder, which is
`hikv.perf` once installed.
"""

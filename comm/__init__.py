"""Process groups, collectives, exchanges and DDP's hook.

Above it, from the ground up: keep, parameter_server, program, execute. May import: cpu_offload, compressors.cuda.
"""

"""bench: workload, timing, sweep, peers/, report; imported by the command line alone.

Owns how the exchange is measured and checked from outside. Refuses to know how rows move.
"""

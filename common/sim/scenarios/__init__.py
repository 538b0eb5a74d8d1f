"""Seeded stories that tests tell and measure: recovery from change, random faults, several balancers, two regions.

Each is a function of a policy and a seed that runs its worlds, all of them under the checkers, and returns what a goal
can be asserted of. Traffic is drawn from published statistics unless rows are given, so they run everywhere.
"""

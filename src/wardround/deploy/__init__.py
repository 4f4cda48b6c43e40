"""Real hospitals: what every federated engine needs, and one folder for each engine.

wire.py: a message as plain JSON and numeric arrays, checked before anything in it is used. Nothing here
imports an engine; what does lies in a folder of its own, such as deploy/nvflare.
"""

"""Fingerprint: summary numbers of each client's data, and how much clients differ.

measure   `measure_clients`: a `Fingerprint` each, safe to share before training
distance  `compare`: distances between clients, a verdict in words, a table and a picture
"""

"""Organiser and hospitals over gRPC with mutual TLS: four methods, all called by hospitals.

service: the methods and what both ends share; server: the organiser's port; client: a hospital's connection.
"""

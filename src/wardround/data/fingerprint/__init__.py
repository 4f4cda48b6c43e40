"""Fingerprint: summary numbers of each client's data, and how much clients differ.

histogram  histograms that join over clients, every number of several patients
hardware   what it computes with
positions  which of two classes lies before the other, in how many patients
case       what is measured of one case, never shared
measure    `measure_client`: its `Fingerprint`, safe to share before training
distance   `compare`: distances between clients, a verdict in words, a table and a picture
"""

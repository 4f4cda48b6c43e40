"""Real hospitals: everything a federated engine needs, whichever it is.

Organiser: project, conducting, remote, live_file. Hospital: kits, site_file, rules, site, ledger.
Both: wire, agreement. deploy/nvflare is the only folder that imports an engine.
"""

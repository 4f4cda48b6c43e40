"""The dossier: one document for a data protection officer, from what a run or a hospital's kit has on record.

`facts` reads the place; `page` puts it into words and answers questions.yaml. Nothing in it is a scan, a
name of a case, a path outside of the folder or a password.
"""

from wardround.deploy.dossier.facts import DossierFacts, read_facts
from wardround.deploy.dossier.page import read_questions, write_dossier

__all__ = ["DossierFacts", "read_facts", "read_questions", "write_dossier"]

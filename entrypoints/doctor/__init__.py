"""The doctor: `report` asks every check and prints the findings; each other file is one subject.

A check reads. It changes nothing but its own probe file.
"""

"""Command `trace`: reads the time line of a run (`read`), works out where each rank's time went
(`breakdown`), and prints it (`command`). The file itself is made by `train.timeline`.
"""

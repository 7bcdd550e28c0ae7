"""What ranks tell each other through the process group's store, and how one notices that another has ended.

Nothing in here launches a collective, so ranks may differ in what they say, and when.
"""

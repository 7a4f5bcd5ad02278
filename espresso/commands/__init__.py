"""The sub-commands of ``espresso``, one file each; ``espresso.cli`` puts them together.

May import: live.
"""

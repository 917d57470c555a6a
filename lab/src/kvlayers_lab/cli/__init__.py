"""The commands of the lab, one file each, and what they share."""

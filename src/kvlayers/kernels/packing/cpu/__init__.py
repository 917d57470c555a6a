"""The C++ kernel that packs blocks on a CPU."""

"""States of a fixed size, of Mamba and linear attention, alone or beside attention."""

"""Who attends to which rows, in integers: members of a group, tiles of a mask, launches, heads by member."""

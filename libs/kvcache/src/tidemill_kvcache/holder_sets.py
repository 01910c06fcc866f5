"""Bit masks of holders, each kept once however many runs have it."""

MASK_BYTES = 256
"""Upper bound of what a mask takes beside its bits: number, list and dictionary entries."""


class HolderSets:
    """Masks by a small number; 0 is the empty mask."""

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        self._numbers: dict[int, int] = {0: 0}
        self._users: list[int] = [1]
        self._free: list[int] = []
        self._most_bits = 0

    @property
    def bytes_used(self) -> int:
        """Memory of all masks (an upper bound)."""
        return len(self.masks) * (MASK_BYTES + self._most_bits // 6)

    def take(self, mask: int) -> int:
        """The number of a mask, for one more user."""
        number = self._numbers.get(mask)
        if number is None:
            number = self._add(mask)
        self._users[number] += 1
        return number

    def give(self, number: int) -> None:
        """A user has done with it."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[self.masks[number]]
            self.masks[number] = 0
            self._free.append(number)

    def meeting(self, bits: int) -> set[int]:
        """Numbers of the masks that have any of the bits."""
        return {number for number, mask in enumerate(self.masks) if mask & bits}

    def _add(self, mask: int) -> int:
        self._most_bits = max(self._most_bits, mask.bit_length())
        if self._free:
            number = self._free.pop()
            self.masks[number] = mask
        else:
            number = len(self.masks)
            self.masks.append(mask)
            self._users.append(0)
        self._numbers[mask] = number
        return number

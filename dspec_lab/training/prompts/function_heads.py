"""Own small Python functions, named and described but not shown, with arguments to compute example results from."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import gcd, isqrt, prod

WORDS = "amber brook cedar dune ember fjord grove heron iris jade kelp lotus moss Nile opal Pine quartz reed".split()


@dataclass(frozen=True, slots=True)
class Head:
    """`does` follows "Return" or "to find"; `solve` is the function, `draw` gives its arguments."""

    names: str  # separated by spaces
    signature: str
    does: str
    draw: Callable[[random.Random], tuple]
    solve: Callable[..., object]


def _ints(low: int = -9, high: int = 20, sizes: tuple[int, int] = (3, 6)) -> Callable[[random.Random], tuple]:
    return lambda r: ([r.randint(low, high) for _ in range(r.randint(*sizes))],)


def _int(low: int, high: int) -> Callable[[random.Random], tuple]:
    return lambda r: (r.randint(low, high),)


def _ints_k(low: int, high: int, k_high: int) -> Callable[[random.Random], tuple]:
    return lambda r: ([r.randint(low, high) for _ in range(r.randint(4, 7))], r.randint(1, k_high))


def _text(r: random.Random) -> tuple:
    return (" ".join(r.sample(WORDS, r.randint(2, 4))),)


def _word(letters: str) -> Callable[[random.Random], tuple]:
    return lambda r: ("".join(r.choice(letters) for _ in range(r.randint(4, 9))),)


def _words(r: random.Random) -> tuple:
    return (r.sample(WORDS, r.randint(3, 5)),)


def _two_lists(r: random.Random) -> tuple:
    return tuple([r.randint(1, 9) for _ in range(4)] for _ in range(2))


def _matrix(r: random.Random) -> tuple:
    columns = r.randint(2, 3)
    return ([[r.randint(0, 9) for _ in range(columns)] for _ in range(r.randint(2, 3))],)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))


def _base(n: int, base: int) -> str:
    return (_base(n // base, base) if n >= base else "") + "0123456789"[n % base]


def _collatz(n: int) -> int:
    return 0 if n == 1 else 1 + _collatz(n // 2 if n % 2 == 0 else 3 * n + 1)


def _longest_run(text: str) -> int:
    return max((len(list(run)) for _, run in groupby(text)), default=0)


def _caesar(text: str, k: int) -> str:
    lower = string.ascii_lowercase
    return text.translate(str.maketrans(lower, lower[k:] + lower[:k]))


LIST, TEXT, WORD, INT = "(numbers: List[int]) -> ", "(text: str) -> ", "(words: List[str]) -> ", "(n: int) -> "
HEADS = (
    Head("gap_sizes neighbour_gaps step_widths", LIST + "List[int]", "the absolute differences of neighbouring numbers",
         _ints(), lambda a: [abs(y - x) for x, y in zip(a, a[1:], strict=False)]),
    Head("above_mean count_above_mean", LIST + "int", "how many numbers are strictly greater than the mean of all",
         _ints(), lambda a: sum(x > sum(a) / len(a) for x in a)),
    Head("running_low lowest_so_far", LIST + "List[int]", "for each position the smallest number seen up to there",
         _ints(), lambda a: list(accumulate(a, min))),
    Head("alternate_sum zigzag_sum", LIST + "int", "the first number minus the second plus the third, and so on",
         _ints(), lambda a: sum(x * (-1) ** i for i, x in enumerate(a))),
    Head("every_kth pick_steps", "(numbers: List[int], k: int) -> List[int]",
         "every k-th number, beginning with the k-th", _ints_k(0, 30, 3), lambda a, k: a[k - 1 :: k]),
    Head("chunk_totals block_sums", "(numbers: List[int], k: int) -> List[int]",
         "the sums of successive blocks of k numbers; the last block may be shorter", _ints_k(0, 30, 3),
         lambda a, k: [sum(a[i : i + k]) for i in range(0, len(a), k)]),
    Head("within_reach close_values", "(numbers: List[int], k: int) -> List[int]",
         "those numbers whose distance from the first one is at most k, in order", _ints_k(0, 20, 8),
         lambda a, k: [x for x in a if abs(x - a[0]) <= k]),
    Head("odd_ones_squared square_odds", LIST + "List[int]", "the squares of the odd numbers in ascending order",
         _ints(), lambda a: sorted(x * x for x in a if x % 2)),
    Head("spread value_range", LIST + "int", "the largest number minus the smallest one", _ints(),
         lambda a: max(a) - min(a)),
    Head("drop_ends trim_extremes", LIST + "List[int]",
         "the numbers in sorted order without one copy of the smallest and one of the largest", _ints(),
         lambda a: sorted(a)[1:-1]),
    Head("is_staircase rises_by_one", LIST + "bool", "whether each number is exactly one more than the one before it",
         lambda r: ([(s := r.randint(0, 9)), s + 1, s + r.choice([2, 2, 3])],),
         lambda a: all(y - x == 1 for x, y in zip(a, a[1:], strict=False))),
    Head("last_to_front bring_last_forward", LIST + "List[int]", "the numbers with the last one moved to the front",
         _ints(), lambda a: a[-1:] + a[:-1]),
    Head("common_divisor shared_divisor", "(first: int, second: int) -> int",
         "the largest integer that divides both", lambda r: (6 * r.randint(2, 15), 4 * r.randint(2, 15)), gcd),
    Head("prime_gap distance_to_prime", INT + "int", "how far it is from n to the next prime that is larger than n",
         _int(2, 90), lambda n: next(d for d in range(1, 99) if _is_prime(n + d))),
    Head("digit_product times_digits", INT + "int", "the product of the decimal digits of n that are not zero",
         _int(10, 9999), lambda n: prod([int(d) for d in str(n) if d != "0"])),
    Head("count_ones set_bits", INT + "int", "the number of ones in the binary form of n", _int(1, 500),
         lambda n: n.bit_count()),
    Head("in_base write_in_base", "(n: int, base: int) -> str", "n written in the given base, which is 2 to 9",
         lambda r: (r.randint(5, 300), r.randint(2, 9)), _base),
    Head("halving_steps hail_length", INT + "int",
         "how many steps lead to 1 when an even n is halved and an odd n becomes 3n + 1", _int(2, 40), _collatz),
    Head("digits_rise climbing_digits", INT + "bool",
         "whether the decimal digits of n strictly increase from the left",
         lambda r: (r.choice([r.randint(100, 999), 135, 278, 1469, 348]),),
         lambda n: all(x < y for x, y in zip(str(n), str(n)[1:], strict=False))),
    Head("own_divisors proper_divisors", INT + "List[int]", "the divisors of n other than n itself, smallest first",
         _int(4, 90), lambda n: [d for d in range(1, n) if n % d == 0]),
    Head("square_below root_square", INT + "int", "the largest perfect square that does not exceed n", _int(2, 900),
         lambda n: isqrt(n) ** 2),
    Head("sum_of_odds odd_total", INT + "int", "the sum of the odd numbers from 1 up to n", _int(3, 60),
         lambda n: sum(range(1, n + 1, 2))),
    Head("flip_words turn_words", TEXT + "str", "the text with every word spelled backwards, the words in place", _text,
         lambda t: " ".join(w[::-1] for w in t.split())),
    Head("vowel_places find_vowels", TEXT + "List[int]", "the positions, from 0, at which a lowercase vowel stands",
         _word("aebkrost"), lambda t: [i for i, c in enumerate(t) if c in "aeiou"]),
    Head("longest_repeat widest_run", TEXT + "int", "the length of the longest stretch of one repeated character",
         _word("aab"), _longest_run),
    Head("move_letters shift_text", "(text: str, k: int) -> str",
         "the text with every lowercase letter moved k places on in the alphabet, from z to a",
         lambda r: (*_text(r), r.randint(1, 9)), _caesar),
    Head("lonely_letters once_only", TEXT + "str", "the characters that occur exactly once, in order", _word("abcdef"),
         lambda t: "".join(c for c in t if t.count(c) == 1)),
    Head("letter_table tally", TEXT + "Dict[str, int]", "a dictionary from each character to how often it occurs",
         _word("klmn"), lambda t: {c: t.count(c) for c in t}),
    Head("word_lengths measure_words", WORD + "Dict[str, int]", "a dictionary from each word to its length", _words,
         lambda w: {x: len(x) for x in w}),
    Head("by_last_letter sort_by_end", WORD + "List[str]",
         "the words sorted by their last letter; words with the same one keep their order", _words,
         lambda w: sorted(w, key=lambda x: x[-1])),
    Head("short_words keep_short", "(words: List[str], limit: int) -> List[str]",
         "the words with at most limit letters", lambda r: (*_words(r), r.randint(3, 5)),
         lambda w, k: [x for x in w if len(x) <= k]),
    Head("braid interleave", "(first: List[int], second: List[int]) -> List[int]",
         "one list with the elements of both by turns, beginning with the first list", _two_lists,
         lambda a, b: [x for pair in zip(a, b, strict=True) for x in pair]),
    Head("same_places matches", "(first: List[int], second: List[int]) -> int",
         "at how many positions both lists hold the same number",
         lambda r: tuple([r.randint(1, 3) for _ in range(5)] for _ in range(2)),
         lambda a, b: sum(x == y for x, y in zip(a, b, strict=True))),
    Head("only_in_one either_not_both", "(first: List[int], second: List[int]) -> List[int]",
         "the sorted numbers that occur in exactly one of the two lists", _two_lists,
         lambda a, b: sorted(set(a) ^ set(b))),
    Head("weigh dot", "(first: List[int], second: List[int]) -> int",
         "the sum of the products of elements at equal positions", _two_lists,
         lambda a, b: sum(x * y for x, y in zip(a, b, strict=True))),
    Head("column_sums add_columns", "(rows: List[List[int]]) -> List[int]", "the sum of each column of the table",
         _matrix, lambda m: [sum(c) for c in zip(*m, strict=True)]),
    Head("best_row richest_row", "(rows: List[List[int]]) -> int",
         "the index of the row with the largest sum; of several, the lowest index", _matrix,
         lambda m: max(range(len(m)), key=lambda i: (sum(m[i]), -i))),
    Head("quarter_turn turn_right", "(rows: List[List[int]]) -> List[List[int]]",
         "the table turned to the right by a quarter", _matrix,
         lambda m: [list(c) for c in zip(*m[::-1], strict=True)]),
)  # fmt: skip

"""Own contest-programming tasks: stories, formats and limits, with solvers that compute the sample outputs."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import gcd

Lines = list[list]


@dataclass(frozen=True, slots=True)
class Task:
    """One task told in several ways. A case is the lines of an input; `solve` gives the output of it."""

    stories: tuple[str, ...]
    reads: str
    prints: str
    limits: str
    case: Callable[[random.Random], Lines]
    solve: Callable[[Lines], object]


def _numbers(low: int, high: int, sizes: tuple[int, int] = (3, 8)) -> Callable[[random.Random], Lines]:
    """n, then n numbers."""

    def case(rng: random.Random) -> Lines:
        n = rng.randint(*sizes)
        return [[n], [rng.randint(low, high) for _ in range(n)]]

    return case


def _numbers_and_k(low: int, high: int, k_high: int = 0) -> Callable[[random.Random], Lines]:
    """n and k, then n numbers; k is at most n, or `k_high` where given."""

    def case(rng: random.Random) -> Lines:
        n = rng.randint(4, 8)
        return [[n, rng.randint(2, k_high or n - 1)], [rng.randint(low, high) for _ in range(n)]]

    return case


def _word(letters: str, low: int = 4, high: int = 11) -> Callable[[random.Random], Lines]:
    return lambda rng: [["".join(rng.choice(letters) for _ in range(rng.randint(low, high)))]]


def _spans(rng: random.Random) -> Lines:
    starts = [rng.randint(0, 20) for _ in range(rng.randint(3, 6))]
    return [[len(starts)], *([s, s + rng.randint(1, 8)] for s in starts)]


def _grid(rng: random.Random) -> Lines:
    rows, columns = rng.randint(3, 5), rng.randint(3, 6)
    return [[rows, columns], *(["".join(rng.choice("..#") for _ in range(columns))] for _ in range(rows))]


def _roads(rng: random.Random) -> Lines:
    n = rng.randint(4, 7)
    pairs = [(a, b) for a in range(1, n + 1) for b in range(a + 1, n + 1)]
    chosen = rng.sample(pairs, rng.randint(2, n))
    return [[n, len(chosen)], *([a, b] for a, b in chosen)]


def _best_window(lines: Lines) -> int:
    (_, k), a = lines
    return max(sum(a[i : i + k]) for i in range(len(a) - k + 1))


def _most_meetings(lines: Lines) -> int:
    end = taken = 0
    for start, stop in sorted(lines[1:], key=lambda span: span[1]):
        if start >= end:
            end, taken = stop, taken + 1
    return taken


def _covered(lines: Lines) -> int:
    total = end = 0
    for start, stop in sorted(lines[1:]):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _free_squares(lines: Lines) -> int:
    (rows, columns), grid = lines[0], [row for (row,) in lines[1:]]
    corners = [(r, c) for r in range(rows - 1) for c in range(columns - 1)]
    return sum("#" not in grid[r][c : c + 2] + grid[r + 1][c : c + 2] for r, c in corners)


def _turned_portions(lines: Lines) -> str:
    (n, k), a = lines
    return " ".join(str(value) for i in range(0, n, k) for value in reversed(a[i : i + k]))


def _parts(points: set, near: Callable) -> int:
    left, count = set(points), 0
    while left:
        count, todo = count + 1, [left.pop()]
        while todo:
            for other in near(todo.pop()):
                if other in left:
                    left.remove(other)
                    todo.append(other)
    return count


def _separate_groups(lines: Lines) -> int:
    edges = lines[1:]
    return _parts(set(range(1, lines[0][0] + 1)), lambda p: [b if a == p else a for a, b in edges if p in (a, b)])


def _fewest_hops(lines: Lines) -> int:
    n, reached, distance = lines[0][0], {1}, 0
    while n not in reached:
        wider = reached | {y for a, b in lines[1:] for x, y in ((a, b), (b, a)) if x in reached}
        if wider == reached:
            return -1
        reached, distance = wider, distance + 1
    return distance


def _longest_climb(lines: Lines) -> int:
    tails: list[int] = []
    for value in lines[1]:
        place = bisect_left(tails, value)
        tails[place : place + 1] = [value]
    return len(tails)


def _fewest_weights(lines: Lines) -> int:
    (_, total), weights = lines
    best = [0] + [10**9] * total
    for amount in range(1, total + 1):
        best[amount] = min([best[amount - w] + 1 for w in weights if w <= amount], default=10**9)
    return best[total] if best[total] < 10**9 else -1


def _trips(lines: Lines) -> int:
    (_, room), loads = lines
    trips, used = 1, 0
    for load in loads:
        if used + load > room:
            trips, used = trips + 1, 0
        used += load
    return trips


def _no_neighbours(lines: Lines) -> int:
    taken = skipped = 0
    for value in lines[1]:
        taken, skipped = skipped + value, max(skipped, taken)
    return max(taken, skipped)


def _longest_even_bars(lines: Lines) -> int:
    seen, best, level = {0: 0}, 0, 0
    for i, mark in enumerate(lines[0][0], 1):
        level += 1 if mark == "L" else -1
        best = max(best, i - seen.setdefault(level, i))
    return best


def _pairs_of_sum(lines: Lines) -> int:
    (n, k), a = lines
    return sum((a[i] + a[j]) % k == 0 for i in range(n) for j in range(i + 1, n))


def _yes(value: object) -> str:
    return "YES" if value else "NO"


def _balance(lines: Lines) -> int:
    a = lines[1]
    return next((i + 1 for i in range(len(a)) if sum(a[:i]) == sum(a[i + 1 :])), -1)


def _needed_repairs(lines: Lines) -> int:
    depth = missing = 0
    for mark in lines[0][0]:
        depth += 1 if mark == "(" else -1
        if depth < 0:
            depth, missing = 0, missing + 1
    return depth + missing


def _common_step(lines: Lines) -> int:
    step = 0
    for value in lines[1]:
        step = gcd(step, value)
    return step


N_LINE = "The first line contains one integer $n$. The second line contains $n$ integers $a_1, a_2, \\ldots, a_n$"
NK_LINE = (
    "The first line contains two integers $n$ and $k$. The second line contains $n$ integers $a_1, a_2, \\ldots, a_n$"
)
SMALL, LARGE = "$1 \\le n \\le 2000$", "$1 \\le n \\le 2 \\cdot 10^5$"
SPAN_LINES = "The first line contains an integer $n$. Each of the next $n$ lines contains two integers $s_i$ and $e_i$"
ROAD_LINES = (
    "The first line contains two integers $n$ and $m$. Each of the following $m$ lines contains two different integers "
    "$u$ and $v$, the ends of one"
)
TASKS = (
    Task(("{name} counts the boats that pass a lock on each of $n$ days. For a report, one stretch is wanted: that "
          "of exactly $k$ days in a row on which the most boats passed.",
          "A row of $n$ hives stands along a path, and hive $i$ holds $a_i$ spoons of honey. {name} may empty exactly "
          "$k$ hives which stand next to one another and wants as much honey as possible.",
          "Each minute a sensor writes down how many drops fell. {name} looks for the $k$ minutes in a row that were "
          "the wettest of all."),
         NK_LINE + ".", "Print the largest total of $k$ neighbouring values.",
         LARGE + ", $1 \\le k \\le n$, $0 \\le a_i \\le 10^9$", _numbers_and_k(0, 30), _best_window),
    Task(("{name} rents out a single rehearsal room. Band $i$ wants it from time $s_i$ until time $e_i$. Two bands can "
          "follow each other without a break, but can never share the room.",
          "A telescope can watch one comet at a time. Comet $i$ can be seen from minute $s_i$ to minute $e_i$ "
          "and has to "
          "be watched throughout; the next one may begin in the very minute when another ends."),
         SPAN_LINES + ".", "Print the largest number of requests that can be granted.",
         LARGE + ", $0 \\le s_i < e_i \\le 10^9$", _spans, _most_meetings),
    Task(("{name} lets a hut to hikers. Party $i$ books it from hour $s_i$ to hour $e_i$, and several parties "
          "may be in at "
          "the same time. The stove burns exactly while anybody is there.",
          "Along a straight road, $n$ sprinklers wet the ground; number $i$ wets everything from metre $s_i$ to metre "
          "$e_i$. {name} measures how much of the road gets wet, and places wetted twice count once."),
         SPAN_LINES + ".", "Print the total length that is covered by at least one span.",
         LARGE + ", $0 \\le s_i < e_i \\le 10^9$", _spans, _covered),
    Task(("A storeroom is drawn as a grid. The sign `#` is a pillar and `.` is bare floor. {name} owns a "
          "square carpet of two "
          "by two cells which must lie flat on bare floor, and asks in how many positions it could lie.",
          "From above, a roof is a grid of chimneys (`#`) and flat cells (`.`). {name} wants to put up a tent "
          "that covers a "
          "square of two by two flat cells and counts the choices."),
         "The first line contains two integers $h$ and $w$. Each of the next $h$ lines has $w$ characters.",
         "Print the number of positions.", "$1 \\le h, w \\le 1000$", _grid, _free_squares),
    Task(("There are $n$ villages and $m$ footpaths, each of which can be walked both ways. {name} delivers letters on "
          "foot and needs a base in every part of the country that cannot be reached from the others.",
          "In a school of $n$ pupils, $m$ pairs of pupils talk to each other. A rumour spreads along such pairs until "
          "nobody new hears it. {name} wants all pupils to know and tells as few of them as possible."),
         ROAD_LINES + " pair.", "Print the smallest number of starting points.",
         "$1 \\le n \\le 10^5$, $0 \\le m \\le 10^5$", _roads, _separate_groups),
    Task(("A message is passed from mast $1$ to mast $n$. There are $m$ pairs of masts which see each other, and each "
          "passing between two such masts takes one second.",
          "{name} stands on stone $1$ of a stream and wants to get to stone $n$. Exactly $m$ pairs of stones are close "
          "enough for a jump, in both directions."),
         ROAD_LINES + " pair.", "Print the smallest number of moves, or `-1` if it is impossible.",
         "$2 \\le n \\le 10^5$, $1 \\le m \\le 2 \\cdot 10^5$", _roads, _fewest_hops),
    Task(("{name} walks past $n$ towers with heights $a_1, \\ldots, a_n$ and takes photographs of some of them. In the "
          "album, each tower has to be strictly taller than the one before, and the order of the walk is kept.",
          "Parcels with weights $a_1, \\ldots, a_n$ come along a belt. {name} may lift some of them off, but "
          "those that "
          "stay must get strictly heavier from first to last."),
         N_LINE + ".", "Print the greatest number that can be kept.", LARGE + ", $1 \\le a_i \\le 10^9$",
         _numbers(1, 20), _longest_climb),
    Task(("{name} has weights of $n$ kinds, and any number of each kind. To balance a sack of $k$ grams, as "
          "few weights "
          "as possible should be put on the other side.",
          "A vending machine pays back $k$ cents with $n$ kinds of coins, of which it never runs out. It "
          "should give out "
          "as few coins as it can."),
         NK_LINE + ".", "Print the smallest number, or `-1` if $k$ cannot be reached exactly.",
         "$1 \\le n \\le 100$, $1 \\le k \\le 10^4$", lambda r: [[3, r.randint(8, 40)], r.sample(range(2, 14), 3)],
         _fewest_weights),
    Task(("Crates wait in a line at a lift that carries at most $k$ kilograms. They are loaded strictly in order; when "
          "the next crate does not fit, the lift goes up and comes back empty.",
          "{name} copies films onto discs of $k$ megabytes in the given order, and no film may be split. As soon as a "
          "film does not fit, a new disc is begun."),
         NK_LINE + ".", "Print how many are used.", LARGE + ", $1 \\le a_i \\le k \\le 10^9$",
         lambda r: [[6, k := r.randint(8, 20)], [r.randint(1, k) for _ in range(6)]], _trips),
    Task(("Along a lane stand $n$ pear trees; tree $i$ bears $a_i$ pears. Whoever picks a tree frightens the "
          "birds into "
          "the trees beside it, which then cannot be picked. {name} wants as many pears as possible.",
          "A band may play on any evenings of a festival, but never on two evenings in a row. On evening $i$ it would "
          "earn $a_i$ coins."),
         N_LINE + ".", "Print the largest possible total.", LARGE + ", $0 \\le a_i \\le 10^9$",
         _numbers(0, 25), _no_neighbours),
    Task(("A dancer's steps are written as a string of `L` and `R`. {name} wants to cut out one piece, "
          "without gaps, in "
          "which both kinds of step occur equally often.",
          "Each car that enters a roundabout turns off to the left or to the right, noted as `L` or `R`. {name} looks "
          "for a longest stretch of the notes with as many left as right turns."),
         "The only line contains a string $s$ of the letters `L` and `R`.",
         "Print the length of the longest such piece, or `0`.", "$1 \\le |s| \\le 10^5$", _word("LR"),
         _longest_even_bars),
    Task(("{name} glues pairs of planks with lengths $a_i$ end to end and saws the result into pieces of length $k$. "
          "Nothing may be left over.",
          "Two of $n$ players are drawn to form a team, and a team may start only if the sum of its numbers is a "
          "multiple of $k$."),
         NK_LINE + ".", "Print the number of suitable pairs $i < j$.", SMALL + ", $1 \\le k, a_i \\le 10^9$",
         _numbers_and_k(1, 30, 6), _pairs_of_sum),
    Task(("{name} threads beads whose colours are noted as letters. A block of neighbouring beads of one "
          "colour is called odd "
          "if it holds an odd number of beads, and it is made as large as possible. How many odd blocks are there?",
          "At a toll gate the makes of passing cars are noted as letters. Cars of one make that follow each "
          "other directly "
          "form a convoy. {name} counts the convoys with an odd number of cars."),
         "One line with a string $s$ of lowercase letters.", "Print how many there are.", "$1 \\le |s| \\le 10^5$",
         _word("aab"), lambda lines: sum(len(list(run)) % 2 for _, run in groupby(lines[0][0]))),
    Task(("On a long plank lie $n$ stones of weights $a_1, \\ldots, a_n$. {name} looks for a stone such that "
          "the stones "
          "to the left of it weigh as much in all as those to the right of it.",
          "A street has $n$ houses with $a_i$ people in house $i$. A letter box is to stand at a house with "
          "equally many "
          "people living before it and after it."),
         N_LINE + ".", "Print the first suitable position, counted from $1$, or `-1` if there is none.",
         LARGE + ", $0 \\le a_i \\le 10^9$",
         lambda r: (lambda a: [[2 * len(a) + 1], [*a, r.randint(0, 9), *r.sample(a, len(a))]])(
             [r.randint(1, 9) for _ in range(r.randint(1, 3))]), _balance),
    Task(("A cat chewed a strip on which only round brackets were printed. {name} can write further brackets at any "
          "place, but cannot erase any, and wants a correct sequence again.",
          "Each `(` is a door that is opened and each `)` one that is closed. Some entries of the log are lost. {name} "
          "wants to know how few entries could have been lost if no door was closed before it was opened and all were "
          "closed at the end."),
         "One line with a string $s$ of the characters `(` and `)`.", "Print the smallest number of additions.",
         "$1 \\le |s| \\le 10^6$", _word("()"), _needed_repairs),
    Task(("{name} wants to pave $n$ corridors of lengths $a_1, \\ldots, a_n$ with tiles of one length each, without "
          "cutting any. The tiles should be as long as possible.",
          "Ropes of $n$ lengths are to be cut into pieces that are all equally long, with nothing left over. "
          "Longer pieces are better."),
         N_LINE + ".", "Print the greatest possible length.", LARGE + ", $1 \\le a_i \\le 10^9$",
         lambda r: [[4], [r.choice([2, 3, 4, 6]) * r.randint(2, 15) for _ in range(4)]], _common_step),
    Task(("At an election, each of $n$ slips carries the number of a candidate. {name} announces the "
          "candidate with the "
          "most slips; with equal counts, the one with the smallest number wins.",
          "{name} keeps a list of the shelf from which each borrowed book came. The shelf used most often "
          "shall be moved "
          "to the front; of several, the one with the lowest number."),
         N_LINE + ".", "Print the winning number.", LARGE + ", $1 \\le a_i \\le 10^9$", _numbers(1, 5, (4, 9)),
         lambda lines: min(Counter(lines[1]).items(), key=lambda item: (-item[1], item[0]))[0]),
    Task(("{name} builds a word out of letter tiles and wants to lay it so that it reads the same from both ends. All "
          "tiles must be used, in any order.",
          "A necklace clasp allows any order of the lettered beads on a string. {name} likes a string that "
          "looks the same "
          "when it is turned around, and no bead may be left."),
         "One line with a string $s$ of lowercase letters.", "Print `YES` if it can be done and `NO` otherwise.",
         "$1 \\le |s| \\le 10^5$", _word("abc", 3, 9),
         lambda lines: _yes(sum(count % 2 for count in Counter(lines[0][0]).values()) <= 1)),
    Task(("Skaters have the strengths $a_1, \\ldots, a_n$, and $n$ is even. {name} splits all of them into "
          "pairs so that "
          "the largest difference inside a pair is as small as possible.",
          "An even number of socks with lengths $a_i$ is sorted into pairs. {name} minds the worst pair: its "
          "two lengths "
          "should be as close as can be."),
         N_LINE + ".", "Print the smallest possible value of the largest difference.",
         "$2 \\le n \\le 10^5$, $n$ is even, $1 \\le a_i \\le 10^9$",
         lambda r: [[6], [r.randint(1, 40) for _ in range(6)]],
         lambda lines: max(b - a for a, b in zip(*(sorted(lines[1])[i::2] for i in (0, 1)), strict=True))),
    Task(("A thermometer gives $n$ readings. {name} calls a reading a peak if it is larger than both the one "
          "before and "
          "the one after; the first and the last are never peaks.",
          "Along a ridge, the heights of $n$ posts are known. A flag goes on every post that is higher than "
          "each of its "
          "two neighbours, and the two end posts get none."),
         N_LINE + ".", "Print how many there are.", "$3 \\le n \\le 10^5$, $-10^9 \\le a_i \\le 10^9$",
         _numbers(-9, 20, (5, 9)),
         lambda lines: sum(a < b > c for a, b, c in zip(lines[1], lines[1][1:], lines[1][2:], strict=False))),
    Task(("{name} carries a stack of $n$ numbered trays in portions of $k$ and turns each portion over while "
          "doing so; the "
          "last portion may be smaller and is turned over as well.",
          "A line of $n$ children with the numbers $a_1, \\ldots, a_n$ is cut into groups of $k$ from the "
          "front, where the last "
          "group may be smaller. At a whistle every group reverses its own order."),
         NK_LINE + ".", "Print the $n$ numbers as they stand at the end, in one line.",
         LARGE + ", $1 \\le k \\le n$", _numbers_and_k(1, 30), _turned_portions),
    Task(("A bank account starts at zero and $n$ bookings follow, of which negative ones are withdrawals. {name} asks "
          "for the deepest point the account ever reaches, the start included.",
          "A diver begins at the surface, at height zero. Then come $n$ moves, up or down by $a_i$ metres; in "
          "this story "
          "the diver may also fly. {name} wants the lowest height of all."),
         N_LINE + ".", "Print the lowest level.", LARGE + ", $-10^9 \\le a_i \\le 10^9$", _numbers(-12, 10),
         lambda lines: min(accumulate(lines[1], initial=0))),
    Task(("Shelves are to carry $k$ jars. Shelf $i$ carries at most $a_i$ jars, and {name} wants to screw on as few "
          "shelves as possible.",
          "A choir of $k$ singers travels in minibuses; bus $i$ has $a_i$ seats. {name} hires as few buses as "
          "possible."),
         NK_LINE + ".", "Print the smallest number, or `-1` if even all of them are too few.",
         LARGE + ", $1 \\le a_i \\le 10^9$, $1 \\le k \\le 10^{12}$", _numbers_and_k(1, 12, 45),
         lambda lines: next((i + 1 for i, total in enumerate(accumulate(sorted(lines[1], reverse=True)))
                             if total >= lines[0][1]), -1)),
    Task(("{name} types a number and can press one key that replaces it by the sum of its digits. The key is pressed "
          "until one digit is left.",
          "A gardener waters a plant with the number $n$ on its pot: each day the number is replaced by the sum of its "
          "decimal digits, until it has a single digit."),
         "One line with an integer $n$.", "Print how many times the number is replaced.", "$0 \\le n \\le 10^{18}$",
         lambda r: [[r.randint(10, 10 ** r.randint(2, 9))]],
         lambda lines: _presses(lines[0][0])),
)  # fmt: skip


def _presses(n: int) -> int:
    return 0 if n < 10 else 1 + _presses(sum(int(digit) for digit in str(n)))

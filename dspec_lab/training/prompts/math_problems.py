"""Own word problems and exercises: stories with numbers drawn so that every quantity stays sensible."""

from __future__ import annotations

import random
from collections.abc import Callable

from dspec_lab.training.prompts.record import TrainPrompt
from dspec_lab.training.prompts.wording import NAMES, distinct

SOURCE = "own_math"
ENDINGS = (
    "", "", "", " Show your reasoning.", " Explain each step.", " Think step by step and put the answer in a box.",
    " Please reason step by step, and put your final answer within \\boxed{}.", " Give the answer as a number.",
    " Solve this step by step.",
)  # fmt: skip
GOODS = (
    "notebooks pens apples pears candles mugs plants postcards stickers lamps scarves bricks tiles marbles shells "
    "buttons ribbons lemons melons loaves muffins jars seeds bulbs coins stamps bottles baskets chairs cushions"
).split()
PLACES = "market bakery workshop library orchard harbour school garden museum station theatre farm".split()
JOBS = "baker carpenter gardener painter teacher tailor driver nurse plumber editor potter florist".split()


def math_problems(count: int, seed: int = 0) -> list[TrainPrompt]:
    """`count` different problems."""
    return distinct(_problem, count, seed, "math", SOURCE)


def _problem(rng: random.Random) -> str:
    return rng.choice(STORIES)(rng) + rng.choice(ENDINGS)


def _shopping(rng: random.Random) -> str:
    a, b = rng.sample(GOODS, 2)
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    count_a, count_b = rng.randint(2, 14), rng.randint(2, 12)
    price_a, price_b = rng.randint(2, 19), rng.randint(2, 15)
    money = count_a * price_a + count_b * price_b + rng.randint(1, 60)
    ask = rng.choice(
        [
            f"How much change does {name} get from ${money}?",
            f"How much does {name} pay in all?",
            f"{name} has ${money}. How many dollars are left?",
            f"With a discount of {rng.choice([5, 10, 20, 25])} percent on the {a}, what is the total?",
        ]
    )
    return (
        f"At the {place}, {a} cost ${price_a} each and {b} cost ${price_b} each. {name} takes {count_a} {a} and "
        f"{count_b} {b}. {ask}"
    )


def _wages(rng: random.Random) -> str:
    name, job = rng.choice(NAMES), rng.choice(JOBS)
    rate, hours, days, extra = rng.randint(9, 34), rng.randint(3, 9), rng.randint(3, 6), rng.randint(2, 8)
    more = rng.choice([1.5, 2])
    ask = rng.choice(
        ["How much is earned that week?", "What is the average pay per day?", "How much is it before the extra hours?"]
    )
    return (
        f"{name} works as a {job} for ${rate} an hour, {hours} hours a day on {days} days. On top come {extra} extra "
        f"hours, each paid {more:g} times as much. {ask}"
    )


def _travel(rng: random.Random) -> str:
    a, b = rng.sample(NAMES, 2)
    speed_a, speed_b, hours = rng.randint(8, 70), rng.randint(8, 70), rng.randint(2, 6)
    gap = (speed_a + speed_b) * hours
    kind = rng.randrange(3)
    if kind == 0:
        return (
            f"{a} and {b} start at the same time from two towns {gap} km apart and move towards each other, {a} at "
            f"{speed_a} km/h and {b} at {speed_b} km/h. After how many hours do they meet?"
        )
    if kind == 1:
        rest = rng.choice([10, 15, 20, 30, 45])
        return (
            f"{a} rides {speed_a * hours} km at {speed_a} km/h, rests for {rest} minutes, and rides another "
            f"{speed_b * 2} km at {speed_b} km/h. How long does the whole trip take?"
        )
    return (
        f"A train leaves at {rng.randint(6, 11)}:{rng.choice(['00', '15', '30', '45'])} and goes {speed_a + 40} km/h "
        f"for "
        f"{hours} hours, then {speed_b + 30} km/h for {rng.randint(1, 4)} hours. How far does it go?"
    )


def _sharing(rng: random.Random) -> str:
    name, other = rng.sample(NAMES, 2)
    goods = rng.choice(GOODS)
    friends, each, left = rng.randint(3, 12), rng.randint(3, 25), rng.randint(0, 2)
    total = friends * each + left
    share = rng.choice(["half", "a third", "a quarter", "two thirds"])
    kind = rng.randrange(3)
    if kind == 0:
        return (
            f"{name} puts {total} {goods} into {friends} boxes so that all hold the same number. How many are in a "
            f"box, and how many are left over?"
        )
    if kind == 1:
        start = rng.randint(2, 20) * 12
        return (
            f"{name} has {start} {goods}. {name} gives {share} of them to {other} and then loses "
            f"{rng.randint(2, 20)}. How many does {name} still have?"
        )
    return (
        f"{name} has {rng.randint(2, 6)} times as many {goods} as {other}. Together they have {rng.randint(3, 30) * 7} "
        f"{goods}. How many does each of them have, if the numbers come out whole?"
    )


def _rates(rng: random.Random) -> str:
    name = rng.choice(NAMES)
    litres, minutes = rng.randint(4, 30), rng.randint(2, 9)
    kind = rng.randrange(4)
    if kind == 0:
        return (
            f"A tap fills {litres} litres in {minutes} minutes. A tank holds {litres * rng.randint(5, 20)} litres and "
            f"is {rng.choice(['empty', 'a quarter full', 'half full'])}. How long does it take to fill it?"
        )
    if kind == 1:
        return (
            f"A recipe for {rng.randint(2, 6)} people needs {rng.randint(100, 400)} g of flour and "
            f"{rng.randint(1, 5)} eggs. How much of both is needed for {rng.randint(8, 30)} people?"
        )
    if kind == 2:
        a, b = rng.randint(3, 9), rng.randint(3, 12)
        return f"One machine finishes an order in {a} hours, another in {b} hours. How long do they take together?"
    return (
        f"{name} reads {rng.randint(12, 45)} pages a day. A book has {rng.randint(180, 700)} pages, and "
        f"{rng.randint(20, 90)} are read already. On which day will the book be finished?"
    )


def _geometry(rng: random.Random) -> str:
    a, b, h = rng.randint(3, 40), rng.randint(3, 30), rng.randint(2, 18)
    return rng.choice(
        [
            f"A rectangular field is {a} m long and {b} m wide. A path of {rng.randint(1, 3)} m runs around it on "
            f"the outside. What is the area of the path?",
            f"A box is {a} cm by {b} cm by {h} cm. What are its volume and its surface?",
            f"A right triangle has legs of {3 * h} cm and {4 * h} cm. Find the hypotenuse, the perimeter and the area.",
            f"A circle has a radius of {h} cm. By how much does its area grow when the radius grows by "
            f"{rng.randint(1, 5)} cm?",
            f"The angles of a triangle are in the ratio {rng.randint(1, 4)}:{rng.randint(2, 5)}:{rng.randint(3, 6)}. "
            f"How large is each?",
            f"Find the distance between the points ({rng.randint(-9, 9)}, {rng.randint(-9, 9)}) and "
            f"({rng.randint(-9, 9)}, {rng.randint(-9, 9)}).",
        ]
    )


def _algebra(rng: random.Random) -> str:
    a, b, c, d = (rng.randint(2, 15) for _ in range(4))
    x, y = rng.randint(-9, 9), rng.randint(-9, 9)
    return rng.choice(
        [
            f"Solve for x: {a}x + {b} = {a * x + b}.",
            f"Solve for x: {a}x - {b} = {c}x + {a * x - b - c * x}.",
            f"Solve the system: {a}x + {b}y = {a * x + b * y} and {c}x - {d}y = {c * x - d * y}.",
            f"Find the roots of x^2 {'+' if -(x + y) >= 0 else '-'} {abs(x + y)}x {'+' if x * y >= 0 else '-'} "
            f"{abs(x * y)} = 0.",
            f"Expand and simplify ({a}x + {b})({c}x - {d}).",
            f"Factor {a * b}x^2 + {a * d + b * c}x + {c * d}.",
            f"If f(x) = {a}x^2 - {b}x + {c}, what is f({x})?",
            f"What is the derivative of {a}x^{rng.randint(2, 6)} + {b}x^2 - {c}x?",
            f"Evaluate the sum of the first {rng.randint(8, 60)} terms of the arithmetic sequence {a}, {a + b}, "
            f"{a + 2 * b}, ...",
            f"Simplify {a * b}/{a * c} and write it as a decimal.",
        ]
    )


def _number(rng: random.Random) -> str:
    a, b = rng.randint(12, 240), rng.randint(12, 240)
    return rng.choice(
        [
            f"What are the greatest common divisor and the least common multiple of {a} and {b}?",
            f"Write {a * rng.randint(2, 6)} as a product of primes.",
            f"What is the remainder when {rng.randint(2, 12)}^{rng.randint(5, 40)} is divided by {rng.randint(3, 13)}?",
            f"How many numbers from 1 to {a + 100} are divisible by {rng.randint(3, 7)} but not by "
            f"{rng.randint(8, 12)}?",
            f"The sum of {rng.choice([3, 5, 7])} consecutive integers is {rng.randint(4, 60) * 105}. What are they?",
            f"What is {rng.randint(3, 95)} percent of {a * 10}, and of what number is {b} the "
            f"{rng.choice([5, 10, 20, 25, 40])} percent?",
            f"Compute {a} * {b} - {rng.randint(10, 900)} and check the result.",
        ]
    )


def _chance(rng: random.Random) -> str:
    red, blue, green = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 7)
    return rng.choice(
        [
            f"A bag holds {red} red, {blue} blue and {green} green marbles. Two are drawn without putting any back. "
            f"What is the chance that both are red?",
            f"In how many ways can {rng.randint(4, 8)} people sit in a row if two of them insist on sitting together?",
            f"A fair die is rolled {rng.randint(2, 4)} times. What is the chance of at least one {rng.randint(1, 6)}?",
            f"How many different teams of {rng.randint(2, 4)} can be made from {rng.randint(6, 11)} players?",
            f"The scores are {', '.join(str(rng.randint(40, 100)) for _ in range(rng.randint(5, 8)))}. Find the "
            f"mean, the median and the range.",
        ]
    )


STORIES: tuple[Callable[[random.Random], str], ...] = (
    _shopping, _shopping, _wages, _travel, _sharing, _sharing, _rates, _geometry, _algebra, _algebra, _number, _chance,
)  # fmt: skip

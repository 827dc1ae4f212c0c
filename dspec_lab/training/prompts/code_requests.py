"""Own requests for programs: functions, classes, fixes, explanations, programs on standard input."""

from __future__ import annotations

import random

from dspec_lab.training.prompts.record import TrainPrompt
from dspec_lab.training.prompts.wording import distinct, fill

SOURCE = "own_code"
WORDS: dict[str, tuple[str, ...]] = {
    "language": (
        "Python", "Python", "Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Rust",
    ),
    "items": (
        "a list of integers", "a list of strings", "a list of floats", "a list of tuples", "a list of dictionaries",
        "a string", "a sentence", "a matrix given as a list of rows", "a dictionary of lists", "two sorted lists",
        "a list of dates", "a nested list", "a linked list", "a binary tree", "a stack", "a queue", "an array",
    ),
    "task": (
        "return the {nth} largest element", "remove duplicates and keep the order",
        "count how often each element occurs", "reverse the order of its parts",
        "find the longest run of equal elements", "group the elements by {key}", "rotate it by {n} places",
        "split it into chunks of size {n}", "check whether it is a palindrome", "find all pairs that add up to {n}0",
        "return the elements at odd positions", "sort it by {key}", "merge overlapping intervals",
        "compute the running sum", "find the first element that does not repeat", "return the most common element",
        "flatten it by one level", "remove every element smaller than {n}",
        "compute the product of all elements except the current one", "find the longest common prefix",
        "count the vowels and the consonants", "replace every {nth} element by zero",
        "swap the first and the last part", "return the indices of the {n} smallest elements",
        "check whether it is sorted", "encode it with run lengths", "find the missing number",
        "move all zeros to the end", "interleave it with a second one of the same length",
        "compute the moving average over {n} elements", "convert it to title case", "find the median",
    ),
    "nth": (
        "second", "third", "fourth", "fifth",
    ),
    "n": (
        "2", "3", "4", "5", "6", "7", "8", "9",
    ),
    "key": (
        "length", "first letter", "last digit", "parity", "number of digits", "month", "price", "name",
    ),
    "thing": (
        "bank account", "shopping cart", "library with books and members", "parking garage", "playlist", "to-do list",
        "temperature converter", "deck of cards", "tic-tac-toe board", "queue with two stacks",
        "least recently used cache", "bounded counter", "stopwatch", "address book",
        "matrix with addition and multiplication", "fraction", "vector in three dimensions", "priority queue",
        "text buffer with undo", "rate limiter", "graph with edges of cost", "polynomial", "inventory of a shop",
        "vending machine", "elevator", "tree of folders and files",
    ),
    "algorithm": (
        "binary search", "merge sort", "quick sort", "insertion sort", "breadth-first search", "depth-first search",
        "Dijkstra's shortest paths", "the sieve of Eratosthenes", "the greatest common divisor by Euclid",
        "topological sort", "the Fibonacci numbers with memoisation", "the knapsack problem by dynamic programming",
        "edit distance", "matrix multiplication", "heap sort", "the longest increasing subsequence",
        "fast exponentiation", "union-find", "conversion between Roman numerals and integers", "the Caesar cipher",
        "the N queens problem", "flood fill", "Newton's method for square roots", "the towers of Hanoi",
        "permutations of a list", "balanced brackets",
    ),
    "style": (
        "", "", "", " Add a docstring.", " Include two examples.", " Do not use any library.", " Handle empty input.",
        " Add type hints.", " Explain how it works.", " Write tests for it.", " Raise an error on bad input.",
        " State the time complexity.", " Keep it short.", " Use recursion.", " Use a loop rather than recursion.",
    ),
    "file": (
        "a CSV file", "a JSON file", "a log file", "a text file", "a configuration file", "a folder of text files",
    ),
    "job": (
        "print the {n} most frequent words", "sum the column `amount` by `{column}`",
        "count lines that contain an error", "remove blank lines and write the rest back",
        "convert it to the other format", "print the average of each column", "find the longest line",
        "merge it with a second one on `{column}`", "validate that `{column}` is never empty",
    ),
    "column": (
        "city", "name", "date", "category", "user", "product", "country", "team",
    ),
    "name": (
        "count_words", "is_prime", "find_max", "merge_lists", "parse_line", "to_binary", "sum_digits", "filter_even",
        "first_repeat", "clean_text", "rotate_left", "add_matrix", "group_by", "is_valid", "compress", "next_date",
    ),
    "type": (
        "list[int]", "list[str]", "list[float]", "str", "int", "float", "dict[str, int]", "list[list[int]]", "bool",
        "tuple[int, int]",
    ),
    "argument": (
        "values", "text", "items", "numbers", "words", "n", "data", "rows", "first", "s",
    ),
    "bug": (
        "it skips the last element", "it returns None", "it fails on an empty list", "it never stops",
        "it changes the list that was passed in", "it is too slow for long input", "it raises a KeyError",
        "it gives wrong results for negative numbers", "it raises an IndexError",
    ),
    "concept": (
        "a generator", "a decorator", "a context manager", "a list comprehension", "a lambda function", "recursion",
        "a hash table", "inheritance", "an abstract class", "exception handling", "a virtual environment", "a closure",
        "a regular expression", "threading", "asynchronous code", "a unit test", "a SQL join", "a REST interface",
        "a pointer", "garbage collection", "big O notation", "a binary tree", "version control",
        "an index in a database",
    ),
    "input": (
        "an integer N and then N integers", "a line of words", "two integers A and B", "a grid of characters",
        "a number of test cases and then one integer a line", "a string of digits", "N pairs of integers",
    ),
    "output": (
        "the sum of the even ones", "the largest difference between two of them", "the number of distinct values",
        "them in descending order", "YES if they form a valid sequence and NO otherwise",
        "the smallest missing positive integer", "the length of the longest increasing run",
        "the number of pairs with an even sum", "each one together with its square",
    ),
}  # fmt: skip
TEMPLATES = (
    "Write a {language} function that takes {items} and is able to {task}.{style}",
    "Write a {language} function `{name}` that takes {items} and should {task}.{style}",
    "Write a Python function to {task}, given {items}.{style}",
    "Create a function in {language} which, given {items}, will {task}.{style}",
    "Implement {algorithm} in {language}.{style}",
    "Show me how to write {algorithm} in {language}.{style}",
    "Design a {language} class for a {thing}.{style}",
    "Write a Python class that models a {thing} with at least three methods.{style}",
    "Write a Python script that reads {file} and will {job}.{style}",
    "Read {input} from standard input and print {output}. Write the program in {language}.{style}",
    "My function `{name}` takes {items}, but {bug}. What are likely causes, and what would a correct version look "
    "like?",
    "Explain {concept} in {language} with a short example.",
    "What is {concept}? Give an example in Python and say when not to use it.",
    "Compare {algorithm} with another way to do the same, with code in {language}.",
    'Write a function with this signature and docstring:\n\ndef {name}(values):\n    """Take {items} and {task}."""\n',
    "Complete the function:\n\n```python\ndef {name}(data):\n    # {task}\n```\n\nThe argument is {items}.",
    "Finish this Python function.\n\n```python\ndef {name}({argument}: {type}) -> {type}:\n"
    '    """Take {items} and {task}."""\n```',
    "Here is the head of a Python function. Give the whole function, nothing else.\n\n"
    "from typing import List\n\ndef {name}({argument}: {type}, k: int) -> {type}:\n"
    '    """ From {items}, {task}.\n    Use k as the limit where one is needed.\n    """\n',
    "Write a function to {task}. The input is {items}.",
    "Write a python function which can {task} for {items}. Call it {name}.",
    "Write a complete Python program. The input holds {input}. The program prints {output}. Answer with code only.",
    "Write unit tests for a function `{name}` that takes {items} and should {task}.",
    "Write a SQL query on a table `orders` with columns `{column1}`, `{column2}` and `amount` that gives the total "
    "amount for each `{column1}`, largest first.",
)


def code_requests(count: int, seed: int = 0) -> list[TrainPrompt]:
    """`count` different requests."""
    return distinct(lambda rng: _request(rng), count, seed, "code", SOURCE)


def _request(rng: random.Random) -> str:
    return fill(rng.choice(TEMPLATES), WORDS, rng)

"""Own competition-like problems in LaTeX wording, from templates with drawn numbers, words and names."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from dspec_lab.training.prompts.record import TrainPrompt
from dspec_lab.training.prompts.wording import NAMES, distinct

SOURCE = "own_contest"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# (ending, weight)
ENDINGS = {
    BOXED: 10, "": 4,
    " Give an exact answer.": 1, "\nExplain your reasoning, then state the answer on its own line.": 1,
    "\n\nShow all your work and box the final result.": 1, " Simplify your answer as far as possible.": 1,
    "\nWork carefully, one step at a time, and finish with the answer in \\boxed{}.": 1, " Justify your answer.": 1,
}  # fmt: skip
OPENINGS = {"": 12, "Solve this problem.\n\n": 1, "Problem. ": 1, "Question: ": 1, "Here is a contest problem.\n": 1}

# <a=2..9> draws a number, <w=x|y> a word, <a> repeats what was drawn, <who1> and <who2> are different names
ALGEBRA = (
    r"Let $f(x) = <a=2..9>x - <b=1..12>$ and $g(x) = x^2 + <c=1..9>$. What is $f(g(<d=2..7>)) - g(f(<d>))$?",
    r"The function $h$ satisfies $h(x + 1) = h(x) + <a=2..9>x$ for every integer $x$, and $h(0) = <b=1..20>$. "
    r"Find $h(<c=8..30>)$.",
    r"Suppose $f(x) = \frac{<a=2..7>x + <b=1..9>}{x - <c=1..9>}$. Determine $f^{-1}(<d=11..25>)$.",
    r"Find all real numbers $x$ with $\sqrt{x + <a=5..60>} = x - <b=1..7>$.",
    r"How many real solutions does $|x - <a=1..9>| + |x + <b=1..9>| = <c=19..40>$ have, and what is their sum?",
    r"Evaluate $\log_{<a=2|3|5|7>} \left(<a>^{<b=3..15>} \cdot \sqrt{<a>^{<c=3|5|7|9|11>}}\right)$.",
    r"If $\log_2 x + \log_4 x + \log_{16} x = \frac{<a=7..63>}{4}$, what is $\log_2 x$?",
    r"Real numbers $x, y > 0$ satisfy $\log_{10} x + 2\log_{10} y = <a=2..9>$ and $3\log_{10} x - \log_{10} y = "
    r"<b=1..8>$. Compute $\log_{10}(xy)$.",
    r"Compute $\sum_{k=1}^{<a=10..80>} (<b=2..9>k + <c=1..15>)$.",
    r"What is the value of $\sum_{n=1}^{<a=9..99>} \frac{1}{n(n+<b=1|2|3>)}$ as a fraction in lowest terms?",
    r"An arithmetic sequence has $a_{<m=3..7>} = <a=5..40>$ and common difference $<d=2..11>$. Let $S_n$ be the sum "
    r"of its first $n$ terms. Find $S_{<n=12..40>}$.",
    r"The second term of a geometric sequence of positive numbers is $<a=2..12>$ and its fourth term is "
    r"$<a>\cdot <r=4|9|16|25>$. What is the sum of the first $<n=4..7>$ terms?",
    r"A sequence is given by $u_1 = <a=1..6>$, $u_2 = <b=1..9>$ and $u_{n+2} = <c=2..4>u_{n+1} + u_n$ for $n \ge 1$. "
    r"Find the remainder when $u_{<n=9..15>}$ is divided by $<m=7|10|11|13>$.",
    r"Let $r$ and $s$ be the roots of $x^2 - <a=5..19>x + <b=1..12> = 0$. Evaluate "
    r"$<w=r^2 + s^2|r^3 + s^3|\frac{1}{r} + \frac{1}{s}|\frac{r}{s} + \frac{s}{r}|(r+1)(s+1)|(r-s)^2>$.",
    r"For which values of the constant $k$ does the equation $x^2 + kx + <a=4|9|16|25|36|49|64> = <b=0|1|2|3>$ have "
    r"exactly one real root?",
    r"The polynomial $p(x) = x^3 - <a=3..12>x^2 + <b=2..20>x - <c=1..15>$ has roots $\alpha, \beta, \gamma$. Without "
    r"finding them, compute $\alpha^2 + \beta^2 + \gamma^2$.",
    r"When a polynomial $P(x)$ is divided by $x - <a=1..4>$ the remainder is $<b=2..15>$; when it is divided by "
    r"$x + <c=1..5>$ the remainder is $<d=16..30>$. Find the remainder when $P(x)$ is divided by $(x - <a>)(x + <c>)$.",
    r"Find the coefficient of $x^{<k=2..6>}$ in the expansion of $(<a=1..3>x + <b=2..5>)^{<n=7..12>}$.",
    r"Positive real numbers $a$ and $b$ satisfy $<p=2..6>a + <q=2..9>b = <s=20..120>$. What is the largest possible "
    r"value of $ab$?",
    r"What is the smallest value that $x + \frac{<a=4|9|16|25|36|50|72>}{x}$ takes over all $x > 0$? For which $x$ is "
    r"it attained?",
    r"Solve the inequality $\frac{x - <a=1..9>}{x + <b=1..9>} < <c=2..5>$ over the real numbers. Write the solution "
    r"as a union of intervals.",
    r"How many integers $n$ satisfy $n^2 - <a=5..25>n + <b=1..20> \le 0$?",
    r"Compute $\det \begin{pmatrix} <a=-5..9> & <b=-4..8> \\ <c=-6..7> & <d=-3..9> \end{pmatrix}$ and decide whether "
    r"the matrix has an inverse with integer entries.",
    r"Let $M = \begin{pmatrix} 1 & <a=2..9> \\ 0 & 1 \end{pmatrix}$. Find the matrix $M^{<n=5..60>}$.",
    r"Find $\mathbf{A}\mathbf{B}$ if $\mathbf{A} = \begin{pmatrix} <a=1..6> & <b=-5..5> \\ <c=-4..4> & <d=1..7> "
    r"\end{pmatrix}$ and $\mathbf{B} = \begin{pmatrix} <e=1..5> & <f=-3..6> \\ <g=-6..2> & <h=1..8> \end{pmatrix}$.",
    r"Simplify $\frac{<a=1..9> + <b=1..9>i}{<c=1..6> - <d=1..6>i}$ to the form $x + yi$ with real $x$ and $y$.",
    r"Let $z = <a=1..6> + <b=1..6>i$. Compute $|z|^2 + \operatorname{Re}(z^{<n=2|3>})$.",
    r"The numbers $x$ and $y$ satisfy $x + y = <a=6..20>$ and $xy = <b=1..8>$. Find $<w=x^2 + y^2|x^3 + "
    r"y^3|x^4 + y^4>$.",
    r"Define $a \star b = <p=2..6>a + <q=2..6>b - ab$ for real $a$ and $b$. For how many integers $t$ between $0$ and "
    r"$<n=10..30>$ is $t \star <m=1..9>$ positive?",
    r"Evaluate $\lfloor \sqrt{<a=50..900>} \rfloor + \lceil \sqrt[3]{<b=30..900>} \rceil - "
    r"\left\lfloor -\frac{<c=20..99>}{<d=3..9>} \right\rfloor$.",
    r"Rationalise the denominator of $\frac{<a=2..12>}{\sqrt{<b=11..23>} - \sqrt{<c=2|3|5|6|7>}}$.",
)
NUMBERS = (
    r"Find the remainder when $<a=2..19>^{<b=30..400>}$ is divided by $<m=7|9|11|13|17|19|23|25>$.",
    r"What is the last digit of $<a=3..49>^{<b=40..300>} + <c=2..29>^{<d=20..200>}$?",
    r"How many positive divisors does $2^{<a=2..7>} \cdot 3^{<b=1..6>} \cdot <p=5|7|11>^{<c=1..4>}$ have that are "
    r"<w=perfect squares|even|odd|multiples of $6$|multiples of $12$|not divisible by $4$>?",
    r"Find the smallest positive integer $n$ with $n \equiv <a=1..4> \pmod{5}$, $n \equiv <b=1..6> \pmod{7}$ and "
    r"$n \equiv <c=1..8> \pmod{9}$.",
    r"Solve $<a=3|5|7|11>x \equiv <b=1..16> \pmod{<m=17|19|23|29|31>}$ for the least non-negative integer $x$.",
    r"Write the base-ten number $<n=200..4000>$ in base $<b=3..9>$. What is the sum of its digits there?",
    r"In base $b$ the number $<x=1|2|3><y=0|1|2|3><z=1|2|3>_b$ is equal to a number of base ten below "
    r"$<n=100..400>$. What is the largest possible base $b$?",
    r"How many trailing zeros does $<n=40..700>!$ have when it is written in base ten?",
    r"What is the greatest integer $k$ such that $<p=2|3|5|7>^k$ divides $<n=30..250>!$?",
    r"Find $\gcd(<a=120..999>, <b=120..999>)$ and $\operatorname{lcm}(<a>, <b>)$.",
    r"A positive integer leaves remainder $<r=1..5>$ when divided by each of $<a=6..9>$, $<b=10..12>$ and "
    r"$<c=14..16>$. What is the smallest such integer greater than $<n=20..90>$?",
    r"How many three-digit numbers have digits whose sum is $<s=4..23>$?",
    r"How many integers from $1$ to $<n=200..2000>$ are divisible by $<a=3|4|5>$ or $<b=6|7|8>$ but not by "
    r"$<c=9|10|11>$?",
    r"Let $p$ be a prime for which $p + <a=12|14|20|24|30>$ and $p + <b=2|6|8|18>$ are prime as well. Find "
    r"the three smallest possible values of $p$.",
    r"Find all pairs of positive integers $(x, y)$ with $<a=3..9>x + <b=4..13>y = <c=60..200>$.",
    r"How many ordered pairs of integers $(m, n)$ satisfy $(m - <a=1..9>)(n + <b=1..9>) = "
    r"<c=12|18|20|24|30|36|45|60>$?",
    r"Determine the number of positive integers $n \le <n=60..500>$ for which $\frac{n + <a=6|8|12|18|24>}{n}$ is an "
    r"integer or $n$ is a perfect <w=square|cube>.",
    r"The decimal expansion of $\frac{<a=1..6>}{<b=7|13|17|19>}$ repeats. Which digit stands in place "
    r"number $<n=50..500>$ after the point?",
    r"Let $s(n)$ be the sum of the decimal digits of $n$. For how many two-digit $n$ does $s(n)$ divide "
    r"$n + <a=1..12>$?",
)
FIGURES = (
    r"In triangle $ABC$, $AB = <a=5..15>$, $AC = <b=6..16>$ and $\angle A = "
    r"<w=30|45|60|90|120|135|150>^\circ$. Find the <v=area of the triangle|length of $BC$>.",
    r"A circle with centre $O$ and radius $<r=9..20>$ has a chord of length $<c=4..16>$. How far is the chord "
    r"from $O$?",
    r"Two tangents are drawn from a point $P$ to a circle of radius $<r=3..12>$. If the distance from $P$ to "
    r"the centre is $<d=14..30>$, what is the length of each tangent?",
    r"A point has rectangular coordinates $(<x=-8|-6|-3|-1|1|3|6|8>, <x>\sqrt{3})$. Convert it to polar coordinates "
    r"$(r, \theta)$ with $r > 0$ and $0 \le \theta < 2\pi$.",
    r"Convert the polar point $\left(<r=2..14>, \frac{<k=1|2|3|5|7>\pi}{<m=3|4|6>}\right)$ to rectangular coordinates.",
    r"Find the angle between $\mathbf{u} = \begin{pmatrix} <a=1..7> \\ <b=-6..6> \end{pmatrix}$ and $\mathbf{v} = "
    r"\begin{pmatrix} <c=-5..5> \\ <d=1..8> \end{pmatrix}$; give its cosine.",
    r"For what $t$ are the vectors $(<a=1..9>, t, <b=-7..7>)$ and $(<c=-5..5>, <d=8..12>, t)$ orthogonal?",
    r"What is the area of the triangle with vertices $(<a=-9..9>, <b=-9..9>)$, $(<c=10..19>, <d=-9..9>)$ and "
    r"$(<e=-9..9>, <f=10..19>)$?",
    r"The line $y = <m=2..6>x + <b=-9..9>$ is reflected in the <w=$x$-axis|$y$-axis|line $y = x$>. Write an equation "
    r"of the image.",
    r"Find the centre and the radius of the circle $x^2 + y^2 - <a=2|4|6|8|10>x + <b=2|4|6|8|12>y = <c=3..40>$.",
    r"A cone of height $<h=6..24>$ and base radius $<r=3..12>$ is cut by a plane parallel to its base at a distance of "
    r"$<k=2..5>$ from the tip. What fraction of the volume lies above the plane?",
    r"Points $D$ and $E$ lie on sides $AB$ and $AC$ of triangle $ABC$ so that $DE \parallel BC$ and $AD : DB = "
    r"<p=1..5> : <q=2..7>$. The area of $ABC$ is $<s=30..300>$. What is the area of the quadrilateral $DBCE$?",
    r"Each interior angle of a regular polygon exceeds its exterior angle by "
    r"$<a=60|90|100|108|120|132|140|144>^\circ$. How many diagonals does the polygon have?",
    r"Given that $\sin\theta = \frac{<w=3}{5|5}{13|8}{17|7}{25|4}{5|12}{13>}$ and $\theta$ lies in the "
    r"<q=first|second> quadrant, compute $<v=\cos 2\theta|\sin 2\theta|\tan\theta|\cos\theta - \sin\theta>$.",
    r"A sphere just fits inside a cylinder of height $<h=4..30>$. How much of the cylinder's volume is left outside "
    r"the sphere?",
    r"A square of side $<a=6..30>$ has a quarter circle of radius $<a>$ drawn around each of two opposite "
    r"corners. Find the area that belongs to both quarter circles.",
)
CHANCES = (
    r"In how many ways can $<n=6..12>$ people be seated in a row if <who1> and <who2> <w=insist on sitting "
    r"next to each other|refuse to sit side by side|must have exactly one person between them>?",
    r"A bag holds $<a=3..9>$ red, $<b=2..8>$ green and $<c=2..7>$ white beads. <who1> draws $<k=2|3>$ of them without "
    r"looking and without putting any back. What is the probability that all have <w=the same|a different> colour?",
    r"<who1> rolls <k=two|three|four> fair dice. What is the probability that the <w=sum is $<s=6..12>$|largest number "
    r"shown is $<m=3..5>$|product is even|numbers are all different>? Write it as $\frac{p}{q}$ in lowest terms.",
    r"How many words of $<n=4..9>$ letters can be made from $A$, $B$ and $C$ in which no two neighbouring letters are "
    r"equal and the first letter is <w=$A$|not $A$>?",
    r"Evaluate $\binom{<n=9..16>}{<k=2..4>} - \binom{<m=6..9>}{<j=2|3>}$.",
    r"A committee of $<k=4..6>$ is formed from $<a=5..9>$ chemists and $<b=4..8>$ historians. How many committees "
    r"contain at least $<m=2|3>$ chemists?",
    r"A path on the grid goes from $(0, 0)$ to $(<a=4..9>, <b=4..9>)$ in unit steps to the right or up. How many such "
    r"paths <w=pass through|avoid> the point $(<c=1..3>, <d=1..3>)$?",
    r"In how many ways can $<n=10..20>$ identical <w=tokens|lanterns|stickers> be given to $<k=3..5>$ children so that "
    r"each child receives at least <m=one|two>?",
    r"A biased coin shows heads with probability $\frac{<a=1|2>}{<b=3|5|7>}$. It is tossed $<n=4..8>$ times. Find the "
    r"probability of exactly $<k=2|3>$ heads.",
    r"<who1> and <who2> take turns at drawing a card from a stack numbered $1$ to $<n=7..30>$, putting it back "
    r"each time. <who1> begins, and whoever first draws a multiple of $<k=3..6>$ wins. What is the probability "
    r"that <who2> wins?",
    r"How many subsets of $\{1, 2, \ldots, <n=7..14>\}$ have <w=no two consecutive elements|an even sum|exactly three "
    r"odd elements|a largest element that is even>?",
)
TALES = (
    r"<who1> paints a fence in $<a=4..9>$ hours and <who2> paints the same fence in $<b=10..16>$ hours. They begin "
    r"together, but after $<c=1|2>$ hours <who1> is called away. <who2> goes on alone at two thirds of the "
    r"former pace. How many hours does the whole job take?",
    r"A ferry goes $<d=24..96>$ km down a river and comes straight back. The current runs at $<c=2..5>$ km/h, and the "
    r"round trip lasts $<t=7..13>$ hours. Find the speed of the ferry in still water.",
    r"A dealer mixes $<a=10..60>$ kg of a tea that is $<p=10..30>\%$ mint with some of a tea that is "
    r"$<q=45..80>\%$ mint. The mixture is to be $<r=32..42>\%$ mint. How many kilograms of the second tea are "
    r"needed? What would the answer be if the first tea weighed twice as much?",
    r"In a tower of cans, each layer has $<d=2..5>$ cans fewer than the layer below it, and the top layer has "
    r"$<a=1..6>$. There are $<n=8..25>$ layers. <who1> sells every can of the lowest $<k=2..5>$ layers. How "
    r"many cans are left?",
    r"<who1> saves $<a=5..30>$ coins in the first week, and each week $<b=2..9>$ more than in the week before. "
    r"<who2> saves $<c=40..90>$ coins every week. After how many weeks has <who1> at least as many coins as "
    r"<who2> in all?",
    r"A colony of $<a=100..900>$ bacteria grows by $<p=10..60>\%$ every $<h=2..6>$ hours. At the same time each day "
    r"$<c=20..80>$ of them are removed. Ignoring the removal on the first day, how large is the colony after "
    r"$24$ hours, to the nearest whole number?",
    r"Five years ago <who1> was $<a=3..6>$ times as old as <who2>. In $<b=4..15>$ years <who1> will be twice as old as "
    r"<who2>. How old are they now? If the ages are not whole numbers, give them as fractions.",
    r"A clock loses $<m=2..9>$ minutes in every $<h=3..10>$ hours. It is set right at noon on a Monday. What "
    r"is the true time when this clock next shows <w=midnight|6:00 in the evening|noon>? When will it show the "
    r"right time again?",
    r"A hall has $<r=12|14|16|18|20|22|24|26|28|30>$ rows. The first row has $<a=14..25>$ seats and every later "
    r"row has $<d=1..3>$ "
    r"more than the one before. Tickets in the front half of the rows cost $\$<p=20..60>$ and all others "
    r"$\$<q=8..19>$. If every seat is sold, how much money is taken?",
    r"Three friends, <who1>, <who2> and <who3>, share a prize in the ratio $<a=2..5> : <b=3..7> : <c=6..9>$. After "
    r"<who3> gives $<d=6..40>$ dollars to <who1>, these two have the same amount. How large was the prize?",
    r"<who1> walks up a moving stairway and counts $<a=25..35>$ steps; walking at twice the pace, <who1> counts "
    r"$<b=36..48>$. How many steps would be visible if the stairway stood still?",
)
GROUPS = (ALGEBRA, NUMBERS, FIGURES, CHANCES, TALES)
_PLACE = re.compile(r"<(\w+)(?:=((?:[^<>]|<\w+=[^<>]*>)+))?>")


def contest_problems(count: int, seed: int = 0) -> list[TrainPrompt]:
    """`count` different problems."""
    return distinct(_problem, count, seed, "math", SOURCE)


def _problem(rng: random.Random) -> str:
    makers = [*(template for group in GROUPS for template in group), *BUILT]
    chosen = rng.choice(makers)
    text = chosen(rng) if callable(chosen) else draw(chosen, rng)
    return _weighted(OPENINGS, rng) + text + _weighted(ENDINGS, rng)


def draw(template: str, rng: random.Random) -> str:
    """`template` with numbers, words and names drawn for its places, from left to right."""
    values = {f"who{i + 1}": name for i, name in enumerate(rng.sample(NAMES, 3))}

    def value(match: re.Match[str]) -> str:
        name, choices = match.groups()
        if choices is not None:
            low, dots, high = choices.partition("..")
            numbers = dots and re.fullmatch(r"-?\d+", low) and re.fullmatch(r"-?\d+", high)
            words = str(rng.randint(int(low), int(high))) if numbers else rng.choice(choices.split("|"))
            values[name] = _PLACE.sub(value, words)
        return values[name]

    return _PLACE.sub(value, template)


def polynomial(coefficients: Sequence[int], variable: str = "x") -> str:
    """LaTeX of a polynomial, highest power first."""
    terms = ""
    for power, c in zip(range(len(coefficients) - 1, -1, -1), coefficients, strict=True):
        if c:
            sign = "-" if c < 0 else "+"
            size = "" if abs(c) == 1 and power else str(abs(c))
            body = size + (variable if power else "") + (f"^{power}" if power > 1 else "")
            terms += f" {sign} {body}" if terms else ("-" if c < 0 else "") + body
    return terms or "0"


def _integer_roots(rng: random.Random) -> str:
    a, b, c = (rng.randint(-7, 7) for _ in range(3))
    p = polynomial([1, -(a + b + c), a * b + b * c + c * a, -a * b * c])
    ask = rng.choice(["Find all roots of", "Factor completely over the integers the polynomial", "Sketch the signs of"])
    return f"{ask} $p(x) = {p}$, given that all of its roots are integers."


def _linear_system(rng: random.Random) -> str:
    x, y, z = (rng.randint(-6, 9) for _ in range(3))
    rows = []
    for _ in range(3):
        a, b, c = rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 6)
        rows.append(f"{a}x + {b}y + {c}z &= {a * x + b * y + c * z}")
    ask = rng.choice(["Compute $x + y + z$.", "Find $xyz$.", "Find the solution.", "What is $x^2 + y^2 + z^2$?"])
    return "Let $x$, $y$, $z$ satisfy\n\\begin{align*}\n" + " \\\\\n".join(rows) + f"\n\\end{{align*}}\n{ask}"


def _lattice(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 7), rng.randint(2, 7), rng.randint(20, 60)
    where = rng.choice(["in the first quadrant, axes excluded,", "with both coordinates non-negative"])
    return f"How many points with integer coordinates {where} satisfy ${a}x + {b}y \\le {c}$?"


def _remainder(rng: random.Random) -> str:
    p = polynomial([rng.choice([1, 2, 3, -1]), *(rng.randint(-9, 9) for _ in range(rng.randint(2, 4)))])
    d = rng.choice([f"x - {rng.randint(1, 4)}", f"x + {rng.randint(1, 4)}", "x^2 - 1", "x^2 + 1", "x^2 - x"])
    return rng.choice(["What remainder is left when", "Find the remainder when"]) + f" ${p}$ is divided by ${d}$" + "."


def _extremum(rng: random.Random) -> str:
    a, h, k = rng.choice([1, 2, 3, -1, -2]), rng.randint(-6, 6), rng.randint(-9, 9)
    low = rng.randint(-5, 0)
    p = polynomial([a, -2 * a * h, a * h * h + k])
    ask = rng.choice([f"Find its range on the interval $[{low}, {low + rng.randint(3, 9)}]$.", "Find its vertex."])
    return f"Consider the quadratic function $q(x) = {p}$. {ask}"


BUILT: tuple[Callable[[random.Random], str], ...] = (
    _integer_roots, _linear_system, _lattice, _remainder, _extremum
)  # fmt: skip


def _weighted(choices: dict[str, int], rng: random.Random) -> str:
    return rng.choices(list(choices), list(choices.values()))[0]

"""Own everyday requests: explaining, writing, advising, rewriting, planning, comparing, extracting."""

from __future__ import annotations

from dspec_lab.training.prompts.record import TrainPrompt
from dspec_lab.training.prompts.wording import NAMES, distinct, fill

SOURCE = "own_chat"
WORDS: dict[str, tuple[str, ...]] = {
    "name": tuple(NAMES),
    "topic": (
        "photosynthesis", "the water cycle", "black holes", "vaccines", "inflation", "plate tectonics",
        "the printing press", "the Roman roads", "coral reefs", "electric motors", "compound interest",
        "the French Revolution", "DNA", "volcanoes", "machine learning", "the immune system", "the silk trade",
        "supply and demand", "tides", "sleep", "batteries", "the Renaissance", "migration of birds", "solar panels",
        "the stock market", "antibiotics", "gravity", "glaciers", "democracy", "the invention of writing", "bees",
        "earthquakes", "nuclear power", "the human heart", "jazz", "impressionism", "the moon landing", "recycling",
        "the ozone layer", "ocean currents", "bridges", "cryptography", "the periodic table",
    ),
    "reader": (
        "a ten year old", "a beginner", "a college student", "my grandmother", "a busy manager",
        "someone who has never heard of it", "a class of teenagers", "a new colleague",
    ),
    "kind": (
        "poem", "short story", "limerick", "letter", "speech", "dialogue", "news report", "diary entry", "fairy tale",
        "product description", "song text", "blog post", "toast", "scene for a play",
    ),
    "subject": (
        "a lighthouse keeper", "the first snow", "a lost umbrella", "moving to a new city",
        "a robot that learns to cook", "an old bicycle", "two rival bakers", "a journey by night train",
        "a garden on a roof", "a talking cat", "a missed phone call", "the last day of school", "a storm at sea",
        "a secret recipe", "a library at midnight", "growing up by a river", "a chess game", "a broken clock",
        "a village without electricity", "an unexpected guest", "the smell of rain",
    ),
    "tone": (
        "cheerful", "sad", "formal", "humorous", "calm", "dramatic", "simple", "nostalgic", "hopeful", "mysterious",
    ),
    "goal": (
        "sleep better", "learn a language", "save money", "run five kilometres", "eat more vegetables",
        "write every day", "prepare for an interview", "organise a small kitchen", "make new friends",
        "read more books", "stop procrastinating", "plan a garden", "train a puppy", "speak in public",
        "repair a bicycle", "cook for a week", "work from home", "reduce plastic waste", "take better photos",
        "start a small business", "learn the guitar", "move house", "deal with stress", "study for exams",
        "host a dinner", "find a new hobby", "write a CV",
    ),
    "place": (
        "Lisbon", "Kyoto", "the Alps", "Nairobi", "Montreal", "a small island", "Istanbul", "Buenos Aires",
        "Edinburgh", "Hanoi", "Cape Town", "a national park", "Prague", "Mexico City", "the coast of Norway", "Jaipur",
    ),
    "mail": (
        "asks a landlord to fix the heating", "thanks a colleague for help", "declines an invitation",
        "asks for a refund", "applies for a job in a bookshop", "invites neighbours to a summer party",
        "apologises for a late delivery", "asks a teacher for more time", "introduces a new team member",
        "reminds a client of an unpaid bill", "proposes a meeting next week", "complains about noise",
        "recommends a former student", "announces a price change",
    ),
    "pair": (
        "cats and dogs as pets", "trains and planes for short trips", "renting and buying a home", "tea and coffee",
        "city life and country life", "paper books and e-books", "cycling and running",
        "cooking at home and eating out", "wood and steel as building materials",
        "mobile phones and computers for work", "summer and winter holidays", "learning alone and in a group",
        "gas and electric stoves", "cash and cards", "novels and films",
    ),
    "dish": (
        "lentil soup", "pancakes", "vegetable curry", "tomato pasta", "bread", "fried rice", "an apple cake",
        "a Greek salad", "bean chili", "mushroom risotto", "potato gratin", "hummus", "an omelette", "banana bread",
    ),
    "sentence": (
        "The meeting that we had on yesterday was very much productive and we has decided lots of things.",
        "Due to the fact that it was raining, the match that was planned got to be cancelled by the organisers.",
        "Me and him was going to the shop when we seen the accident happening.",
        "It is important that one should always be careful when one is crossing a street that has traffic.",
        "The report, which was written by the team that works in the north office, it contains several errors.",
        "She don't like neither the colour nor the shape, but its cheap so she will took it.",
        "In my opinion I think that the new rules are not really as helpful as they could be possibly.",
    ),
    "text": (
        "{name1} opened the bakery at five. By nine the bread was gone, and {name2} had to bake again. In the "
        "afternoon a school ordered forty rolls, and the two worked until the evening.",
        "The town of Harrow Bay has 12,400 people. Its fish market opened in 1897 and employs about 300 of them. A "
        "new pier, paid for by the county, will open in May.",
        "The meeting is moved from Tuesday to Thursday at 3 pm. {name1} brings the figures, {name2} the slides. The "
        "room is 204, and lunch is at one.",
        "Owls hunt at night. Their feathers are soft at the edges, so they fly almost without a sound. Their ears "
        "sit at different heights, which tells them where a sound comes from.",
        "Our order of 12 March has not arrived. We paid 340 euros on the same day. Please tell us by Friday when the "
        "20 lamps will be delivered, or return the money. {name1}, Brightwell Hotel",
    ),
    "ask": (
        "Summarise the text in one sentence.", "List the names and numbers in the text.",
        "Rewrite the text for a child.", "Write three questions about the text, with answers.",
        "Turn the text into bullet points.", "Give the text a title and say why it fits.",
        "Translate the text into French.", "What could happen next?",
    ),
    "question": (
        "Why is the sky blue?", "How do aeroplanes stay in the air?", "Why do we dream?",
        "How does a refrigerator work?", "Why do leaves change colour?", "What causes thunder?",
        "How do languages die out?", "Why does bread rise?", "How are glass bottles made?", "Why do cats purr?",
        "How does the internet reach an island?", "Why is the sea salty?", "How do magnets work?",
        "What is money worth?", "Why do people like music?", "How do seeds know when to grow?",
    ),
    "count": (
        "three", "four", "five", "six", "seven", "ten",
    ),
    "role": (
        "a patient teacher", "a museum guide", "a detective", "a travel agent", "a librarian",
        "a doctor from the year 1850", "a chef", "a sports coach", "a ship's captain", "a gardener",
        "a job interviewer", "a philosopher",
    ),
    "length": (
        "", "", "", " Use at most 100 words.", " Answer in one paragraph.", " Use bullet points.", " Keep it brief.",
        " Give an example.",
    ),
}  # fmt: skip
TEMPLATES = (
    "Explain {topic} to {reader}.{length}",
    "What is {topic}, and why does it matter?{length}",
    "Give me {count} facts about {topic}.{length}",
    "What are common mistakes people make about {topic}?{length}",
    "Write a {tone} {kind} about {subject}.{length}",
    "Write a {kind} in which {name} meets {subject}. The tone should be {tone}.",
    "How can I {goal}?{length}",
    "I want to {goal}. Make a plan for {count} days.",
    "Give {count} tips on how to {goal}.{length}",
    "What should I see in {place} in {count} days?{length}",
    "Plan a trip to {place} for a family with two children.",
    "Write an email that {mail}. Sign it as {name}.{length}",
    "Write a short, {tone} message that {mail}.",
    "Compare {pair}.{length}",
    "What are the advantages and disadvantages of {pair}?{length}",
    "Give me a recipe for {dish} for {count} people.",
    "I have no oven. How can I still make {dish}?",
    "Correct this sentence and explain the changes: {sentence}",
    "Rewrite this more clearly: {sentence}",
    "{ask}\n\n{text}",
    "Here is a text.\n\n{text}\n\n{ask}",
    "{question}{length}",
    "{question} Answer as {role} would.",
    "Act as {role}. I ask you: how can I {goal}?",
    "Invent {count} names for a shop that sells things to {goal}, and explain the best one.",
    "List {count} questions one could ask {role} about {topic}.",
    "Write a quiz with {count} questions about {topic}, with the answers at the end.",
    "Is it better to {goal1} first or to {goal2} first? Give reasons.",
)


def chat_requests(count: int, seed: int = 0) -> list[TrainPrompt]:
    """`count` different requests."""
    return distinct(lambda rng: fill(rng.choice(TEMPLATES), WORDS, rng), count, seed, "chat", SOURCE)

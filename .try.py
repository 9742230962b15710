import sys
sys.path.insert(0,'.')
import bus.log; bus.log.configure(level="critical", json=True)
import tests.model.test_transfer_model as t, time
from tests.model._play import play_all
n=int(sys.argv[1]); t0=time.time()
r=play_all(n,t.build,t.TransferPlay)
print(time.time()-t0)
for k,v in sorted(r.items()): print(v,k)

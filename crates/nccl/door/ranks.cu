// All-reduce among N processes that share one GPU and look like N hosts: right or wrong, and how long. With a size of 0: rank 1 is killed meanwhile.
#include <nccl.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#define CK(x) do{auto e_=(x); if(e_!=cudaSuccess){printf("cuda %s line %d\n",cudaGetErrorString(e_),__LINE__);fflush(stdout);_exit(1);} }while(0)
#define NK(x) do{auto e_=(x); if(e_!=ncclSuccess&&e_!=ncclInProgress){printf("nccl %s line %d\n",ncclGetErrorString(e_),__LINE__);fflush(stdout);_exit(1);} }while(0)
using Clock=std::chrono::steady_clock;
static double us(Clock::time_point a){return std::chrono::duration<double,std::micro>(Clock::now()-a).count();}
int main(int c,char**v){
  int n=atoi(v[1]); std::vector<size_t> sizes; for(int i=2;i<c;i++) sizes.push_back(atol(v[i]));
  int pipes[16][2]; for(int i=0;i<n;i++) if(pipe(pipes[i])) return 1;
  int r=0; std::vector<pid_t> kids; for(int i=1;i<n;i++){pid_t p=fork(); if(!p){r=i;kids.clear();break;} kids.push_back(p);}
  char h[32]; sprintf(h,"host%d",r); setenv("NCCL_HOSTID",h,1);
  ncclUniqueId id; if(r==0){NK(ncclGetUniqueId(&id)); for(int i=1;i<n;i++) if(write(pipes[i][1],&id,sizeof id)<0) return 1;} else if(read(pipes[r][0],&id,sizeof id)<0) return 1;
  CK(cudaSetDevice(0)); ncclComm_t comm; NK(ncclCommInitRank(&comm,n,id,r));
  cudaStream_t s; CK(cudaStreamCreateWithFlags(&s,cudaStreamNonBlocking));
  size_t most=1<<20; for(auto b:sizes) most=std::max(most,b);
  float*a,*b; CK(cudaMalloc(&a,most)); CK(cudaMalloc(&b,most));
  std::vector<float> host(most/4);
  for(size_t bytes:sizes){
    if(bytes==0){
      auto t0=Clock::now(); bool killed=false; double at=0; int calls=0;
      while(us(t0)<40e6){
        NK(ncclAllReduce(a,b,1<<18,ncclFloat,ncclSum,comm,s));
        bool bad=false; ncclResult_t state=ncclSuccess;
        while(cudaStreamQuery(s)==cudaErrorNotReady){
          if(r==0&&!killed&&us(t0)>2e6){kill(kids[0],SIGKILL);killed=true;at=us(t0);}
          ncclCommGetAsyncError(comm,&state); if(state!=ncclSuccess&&state!=ncclInProgress){bad=true;break;}
          if(us(t0)>40e6){printf("rank %d: no error after 38 s\n",r);fflush(stdout);_exit(1);}
        }
        if(bad){printf("rank %d: %s %.0f ms after the kill, %d calls before\n",r,ncclGetErrorString(state),(us(t0)-at)/1e3,calls);fflush(stdout);ncclCommAbort(comm);printf("rank %d: aborted after %.0f ms\n",r,(us(t0)-at)/1e3);fflush(stdout);_exit(0);}
        calls++;
      }
      _exit(1);
    }
    size_t e=bytes/4; for(size_t i=0;i<e;i++) host[i]=(float)((i*7+r*13)%31);
    CK(cudaMemcpy(a,host.data(),bytes,cudaMemcpyHostToDevice));
    auto run=[&]{NK(ncclAllReduce(a,b,e,ncclFloat,ncclSum,comm,s));};
    for(int i=0;i<3;i++) run(); CK(cudaStreamSynchronize(s));
    CK(cudaMemcpy(host.data(),b,bytes,cudaMemcpyDeviceToHost));
    bool right=true; for(size_t i=0;i<e;i++){float want=0; for(int k=0;k<n;k++) want+=(float)((i*7+k*13)%31); right&=host[i]==want;}
    int it=bytes>(32u<<20)?4:bytes>(1u<<20)?15:60; std::vector<double> t;
    for(int rep=0;rep<5;rep++){auto t0=Clock::now(); for(int i=0;i<it;i++) run(); CK(cudaStreamSynchronize(s)); t.push_back(us(t0)/it);}
    std::sort(t.begin(),t.end());
    if(r==0||!right){printf("%d ranks %10zu B %10.1f us %7.2f GB/s %s\n",n,bytes,t[2],bytes/t[2]/1e3,right?"right":"WRONG");fflush(stdout);}
  }
  NK(ncclCommDestroy(comm)); for(auto p:kids) waitpid(p,nullptr,0);
}
